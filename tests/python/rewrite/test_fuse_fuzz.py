"""fuse against eager PyTorch on programs that hypothesis draws; `python -m fuzz` draws more of the same."""

import logging
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fuzz.program.corpus import CORPUS
from fuzz.program.drawing import build
from fuzz.program.programs import Input, Program, Statement
from fuzz.run.comparison import differences
from fuzz.run.execution import calls_of, observe, prepared
from fuzz.run.masks import Masks, disagreement, intercepted
from fuzz.run.minimise import minimised
from fuzz.run.reproduction import reproduction
from fuzz.run.trial import trial
from onepass import _native

PROGRAMS = 100
SETTINGS = settings(
    max_examples=PROGRAMS,
    phases=[Phase.generate],  # what fails is made small by `minimised`
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


_native.info()  # finds the compiler, once for the process: programs are run as if there were none


@pytest.fixture(autouse=True)
def ready():
    logging.disable(logging.CRITICAL)
    with prepared(), intercepted():
        yield
    logging.disable(logging.NOTSET)
    torch._dynamo.reset()


def test_programs_are_the_same_fused():
    """And most of them have lines, else this would show nothing."""
    with_lines = 0

    @SETTINGS
    @given(st.integers(0, 2**48))
    def check(seed):  # hypothesis' own randoms are mostly zeros and ones: few programs of these have lines
        nonlocal with_lines
        torch.manual_seed(seed)
        program = build(random.Random(seed))
        outcome = trial(program)
        with_lines += bool(outcome.lines)
        if outcome.found:
            kinds = {d.kind for d in outcome.found}
            least = minimised(program, lambda p: kinds & {d.kind for d in trial(p).found}, tries=40)
            pytest.fail(reproduction(least, "\n".join(map(str, outcome.found))))

    check()
    assert with_lines > PROGRAMS // 2


def program(body, *inputs, returns=("t9",), **options):
    """Of statements, a line each, and inputs as (name, source, grad)."""
    statements = tuple(Statement(line, (line[:2],)) for line in body.splitlines())
    return Program(tuple(Input(*i) for i in inputs), (), statements, returns, (3,), ("training",), **options)


X = ("x1", "R(3, 4)", True)
S = ("x2", "torch.zeros(3, 4)", False)
PLAIN = program("x2.add_(1.0)\nt8 = x1 * 2.0\nt9 = F.gelu(t8)", X, S, returns=("t9", "t8"))


@pytest.mark.parametrize(
    "kind, broken",
    [
        ("value", lambda x, s: (s.add_(1.0), (F.relu(x * 2.0), x * 2.0))[1]),
        ("input", lambda x, s: (F.gelu(t := x * 2.0), t)),
        ("gradient", lambda x, s: (s.add_(1.0), (F.gelu(x.detach() * 2.0) + 0.0 * x, x * 2.0))[1]),
        ("gradient", lambda x, s: (s.add_(1.0), (F.gelu(x * 2.0), x * 2.0))[1]),
        ("strides", lambda x, s: (s.add_(1.0), (F.gelu(t := x * 2.0).mT.contiguous().mT, t))[1]),
        ("dtype", lambda x, s: (s.add_(1.0), (F.gelu(t := x * 2.0).float(), t))[1]),
        ("shape", lambda x, s: (s.add_(1.0), (F.gelu(t := x * 2.0)[None], t))[1]),
        ("sharing", lambda x, s: (s.add_(1.0), torch.stack([F.gelu(t := x * 2.0), t]).unbind())[1]),
        ("requires_grad", lambda x, s: (s.add_(1.0), (F.gelu(t := x * 2.0).detach(), t))[1]),
        ("error", lambda x, s: x.view(7, 13)),
        ("results", lambda x, s: (s.add_(1.0), F.gelu(x * 2.0))[1]),
    ],
)
def test_differences_are_seen(kind, broken):
    """Each is a fault that a rewriter might make. The second gradient is that of a returned intermediate: of another
    product than the one that is used."""
    calls = calls_of(PLAIN)
    expected, found = (
        observe(PLAIN, way, calls, Masks()) for way in (lambda made: made, lambda made: lambda *a: broken(*a))
    )
    assert kind in {d.kind for d in differences(calls, expected, found, 1e-9)}
    assert not differences(calls, expected, expected, 1e-9)


def test_a_mask_that_is_drawn_again_is_seen():
    """Of a block that is checkpointed: the same for eager, another where the generator is not put back."""
    body = "t9 = checkpoint(lambda t: F.dropout(F.gelu(t), 0.5), x1, use_reentrant=False)"
    dropped = program(body, ("x1", "R(8, 16)", True))
    right, wrong = Masks(), Masks()
    observe(dropped, lambda made: made, calls_of(dropped), right)
    careless = body.replace("use_reentrant=False", "use_reentrant=False, preserve_rng_state=False")
    observe(program(careless, ("x1", "R(8, 16)", True)), lambda made: made, calls_of(dropped), wrong)
    assert disagreement(right, right) is None
    assert "another mask" in disagreement(wrong, right)


@pytest.mark.parametrize("name", CORPUS)
def test_programs_by_hand(name):
    outcome = trial(CORPUS[name])
    assert not outcome.raises
    assert not outcome.found, reproduction(CORPUS[name], "\n".join(map(str, outcome.found)))


@pytest.mark.parametrize("then", ["eager", "aot_eager"])
def test_a_program_that_has_lines(then):
    with prepared(then):
        outcome = trial(PLAIN, then)
    assert outcome.lines and not outcome.found and not outcome.raises


@pytest.mark.parametrize(
    "body", ["t9 = F.layer_norm(x1, (4,), None, self.b2)", "t9 = F.gelu(x1 * 2.0) * self.b2.dim()"]
)
def test_a_buffer_that_has_another_shape_in_the_next_call(body):
    """It is a finding where that is not seen, as Dynamo of torch 2.11 alone does not see it."""
    buffer = Input("self.b2", "self.register_buffer('b2', R(4))")
    changes = replace(program(f"{body}\nself.b2.unsqueeze_(0)", X), state=(buffer,))
    outcome = trial(changes)
    assert outcome.lines and not outcome.found and not outcome.torchs_own
