"""fuse against eager PyTorch on programs that hypothesis draws; `python -m fuzz` draws more of the same."""

import logging

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.drawing import build
from fuzz.execution import prepared
from fuzz.masks import intercepted
from fuzz.reproduction import reproduction
from fuzz.trial import trial

PROGRAMS = 250
SETTINGS = settings(
    max_examples=PROGRAMS,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def ready():
    logging.disable(logging.CRITICAL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with prepared(), intercepted():
        yield
    torch.set_num_threads(threads)
    logging.disable(logging.NOTSET)
    torch._dynamo.reset()


def test_programs_are_the_same_fused():
    """And most of them have lines, else this would show nothing."""
    with_lines = 0

    @SETTINGS
    @given(st.randoms(use_true_random=False))
    def check(chance):
        nonlocal with_lines
        torch.manual_seed(1)
        program = build(chance)
        outcome = trial(program)
        with_lines += bool(outcome.lines)
        assert not outcome.found, reproduction(program, "\n".join(map(str, outcome.found)))

    check()
    assert with_lines > PROGRAMS // 2
