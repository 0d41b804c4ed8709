"""A user's own word: in every line on both devices, checked when it is defined, found in models."""

import copy
import math
import os
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import onepass
from helpers import check_line, make_inputs
from onepass import word as vocabulary
from onepass.cli import app
from onepass.rewrite import fuse as fusing

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
SNAKE = {
    "parameters": ["a"],
    "source": """
        template <class L> static L forward(L x, scalar a) { L s = sin(a * x); return x + s * s / a; }
        template <class L> static L backward(L x, L dy, scalar a) { return dy * (1 + sin(2 * a * x)); }
    """,
    "reference": lambda x, a: x + torch.sin(a * x) ** 2 / a,
    "formulas": ["x + sin(a * x) ** 2 / a"],
}
PRELU = {  # its gradients are derived
    "operand": "column",
    "operand_name": "weight",
    "source": "template <class L> static L forward(L x, L weight) { return where(x > 0, x, weight * x); }",
    "reference": lambda x, weight: torch.where(x > 0, x, weight * x),
}
SWEEP = {
    "operand": "tensor",
    "parameters": ["a", "b"],
    "source": """
        template <class L> static gradients<L> backward(L x, L u, L dy, scalar a, scalar b) {
          const L t = tanh(a * u + b);
          return {dy * t, dy * x * a * (1 - t * t)};
        }
        template <class L> static L forward(L x, L u, scalar a, scalar b) {
          return x * tanh(a * u + b);
        }
    """,
    "reference": lambda x, u, a, b: x * torch.tanh(a * u + b),
    "example": [0.7, -0.3],
}


@pytest.fixture(scope="module", autouse=True)
def words():
    """The compilers take seconds: defined once."""
    onepass.define_word("snake", **SNAKE)
    onepass.define_word("own_prelu", **PRELU)
    onepass.define_word("sweep", **SWEEP)
    yield
    for name in ("snake", "own_prelu", "sweep"):
        onepass.undefine_word(name)


LINES = (
    "layer_norm(1e-5) | scale | bias | snake(0.5)",
    "bias | own_prelu | dropout(0.2) | add | keep | rms_norm(1e-6)",
    "sweep(0.7, -0.3) | softmax",
    "gate(snake(1.5)) | sweep(0.3, 0.1)",
    "snake(0.5) | linear | bias | snake(2.0)",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("device", DEVICES)
def test_error_is_no_more_than_pytorchs(line, dtype, device):
    check_line(line, make_inputs(line, (3, 7, 65), dtype, device), slack=2.0)


@pytest.mark.parametrize("device", DEVICES)
def test_gradcheck(device):
    inputs = make_inputs("sweep(0.7, -0.3) | own_prelu", (3, 5), torch.float64, device)
    line = onepass.Line("sweep(0.7, -0.3) | own_prelu")
    assert torch.autograd.gradcheck(lambda *tensors: line(*tensors), inputs.tensors)


@pytest.mark.parametrize("device", DEVICES)
def test_derived_gradients_select(device):
    """What `where` and `max` leave out adds no gradient, whatever the derivative is there: as in PyTorch."""
    onepass.define_word(
        "root_or_none",
        source="template <class L> static L forward(L x) { return where(x > 1, x * sqrt(max(x - 1, L(0))), L(0)); }",
        reference=lambda x: torch.where(x > 1, x * torch.sqrt(torch.clamp_min(x - 1, 0)), 0),
    )
    try:
        x = torch.tensor([-2.0, 1.0, 2.0, 5.0], device=device, requires_grad=True)
        for upstream in (1.0, math.nan, math.inf):
            (dx,) = torch.autograd.grad(onepass.fused("root_or_none", x), x, torch.full_like(x, upstream))
            assert dx[:2].tolist() == [0, 0] and math.isfinite(dx[3]) == math.isfinite(upstream)
        weight = torch.full((4,), 0.5, device=device, requires_grad=True)
        grads = torch.tensor([math.nan, 1.0, math.nan, 1.0], device=device)
        ours = torch.autograd.grad(onepass.fused("own_prelu", x, weight), (x, weight), grads)
        theirs = torch.autograd.grad(PRELU["reference"](x, weight), (x, weight), grads)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    finally:
        onepass.undefine_word("root_or_none")


def test_in_the_vocabulary():
    (word,) = [w for w in onepass.words() if w.name == "sweep"]
    assert (word.operand, word.operand_name, word.parameter_name) == ("tensor", "u", "a, b")
    (snake,) = onepass.Line("snake(0.5)").words
    assert snake.parameters == (0.5,) and snake.formula == "x + sin(a * x) ** 2 / a" and snake.kind == "activation"
    assert str(onepass.Line("sweep( 1.5,2 )").words[0]) == "sweep(1.5, 2)"
    report = onepass.defined_words()["snake"].report
    assert report.errors["cpu", "float64"] < 1e-12 and "cpu" in report.compile_seconds


def test_numbers_are_all_required():
    for text, match in (
        ("sweep", "'sweep' needs 2 numbers: sweep[(]a, b[)]"),
        ("sweep(1)", "'sweep' takes 2 numbers [(]a, b[)]"),
        ("sweep(1, 2, 3)", "expected '[)]' to end 'sweep'"),
    ):
        with pytest.raises(onepass.LineError, match=match):
            onepass.Line(text)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    x, b = torch.randn(6, 40, device=device), torch.randn(40, device=device, requires_grad=True)

    def of(x, b):
        return onepass.fused("bias | snake(0.5) | own_prelu", x, b, b)

    ours, theirs = of(x, b), torch.compile(of, fullgraph=True, backend="aot_eager")(x, b)
    torch.testing.assert_close(theirs, ours)
    grads = torch.autograd.grad(ours.sum(), b), torch.autograd.grad(theirs.sum(), b)
    torch.testing.assert_close(*grads)


class Written(torch.nn.Module):
    """As a model would write it out."""

    def __init__(self, a=0.3):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.a = a

    def forward(self, x):
        y = self.norm(x)
        return y + 1 / self.a * torch.sin(y * self.a) ** 2


@pytest.mark.parametrize("device", DEVICES)
def test_fuse_and_explain_find_it(device):
    model, x = Written().to(device), torch.randn(512, 64, device=device)
    fused = onepass.fuse(copy.deepcopy(model))
    ours, theirs = fused(x), model(x)
    torch.testing.assert_close(ours, theirs)
    assert "snake(0.3" in str(onepass.report(fused))
    torch.testing.assert_close(
        *(torch.autograd.grad(y.square().sum(), m.norm.weight)[0] for y, m in ((ours, fused), (theirs, model)))
    )
    assert "snake(0.3" in str(onepass.explain(model, x, device="h200"))


HARD = {
    "source": "template <class L> static L forward(L x) { return min(max(x + 3, 0), 6) / 6; }",
    "reference": torch.nn.functional.hardsigmoid,
    "targets": [torch.nn.functional.hardsigmoid],
    "numbers": lambda inplace=False: (),
}
THRESHOLD = {
    "parameters": ["least", "other"],
    "source": "template <class L> static L forward(L x, scalar a, scalar b) { return where(x > a, x, b + 0 * x); }",
    "reference": torch.nn.functional.threshold,
    "targets": [torch.threshold, "own_method"],
}


def test_modules_that_call_a_target(monkeypatch):
    """fuse and explain need no more than the definition: neither a formula nor another table."""
    monkeypatch.setattr(fusing, "gain_of", lambda chain, *_, **__: float(len(chain.nodes)))  # small tensors, too
    onepass.define_word("own_hard", **HARD)
    onepass.define_word("own_threshold", **THRESHOLD)
    try:
        modules = torch.nn.Hardsigmoid(), torch.nn.Threshold(0.1, 0.25)
        model, x = torch.nn.Sequential(torch.nn.LayerNorm(64), *modules), torch.randn(512, 64)
        line = "layer_norm(1e-05) | scale | bias | own_hard | own_threshold(0.1, 0.25)"
        assert [advice.line for advice in onepass.explain(model, x, device="h200").lines] == [line]
        fused = onepass.fuse(copy.deepcopy(model))
        torch.testing.assert_close(fused(x), model(x))
        assert [each.line for each in onepass.report(fused).lines] == [line]
    finally:
        onepass.undefine_word("own_hard")
        onepass.undefine_word("own_threshold")
    torch._dynamo.reset()
    assert "own_hard" not in str(onepass.explain(model, x, device="h200"))


def test_arguments_of_a_target_are_the_parameters():
    numbers = onepass.defined_words()["sweep"].numbers
    assert numbers(1, b=0.5) == (1.0, 0.5)
    assert numbers(1, torch.ones(2)) is None
    with pytest.raises(TypeError):
        numbers(1)


def test_words_that_map_zero_to_zero():
    """Found out, not asked for."""
    properties = {word.name: word.properties for word in onepass.words()}
    assert properties["snake"] == properties["own_prelu"] == properties["sweep"] == ("maps_zero_to_zero",)
    root = {"source": "template <class L> static L forward(L x) { return sqrt(x); }", "reference": torch.sqrt}
    cosine = {"source": "template <class L> static L forward(L x) { return cos(x); }", "reference": torch.cos}
    for name, word in (("own_root", {**root, "domain": (0.5, 4)}), ("own_cosine", cosine)):  # infinite slope; no zero
        assert onepass.define_word(name, **word).properties == ()
        onepass.undefine_word(name)


def test_zeros_behind_softmax():
    """Such a word's lines leave out what a causal mask hides."""
    q, k, v = torch.randn(3, 2, 8, 96, 32, dtype=torch.float64, requires_grad=True).unbind()
    line = onepass.Line("scores | causal | softmax | snake(0.5) | values")
    ours, theirs = line(q, k, v), line.reference(q, k, v)
    torch.testing.assert_close(ours, theirs)
    for got, expected in zip(*(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (ours, theirs))):
        torch.testing.assert_close(got, expected)


def test_numbers_that_do_not_agree_are_another_formula():
    def other(x):
        return x + torch.sin(0.5 * x) ** 2 / 0.6

    x = torch.randn(512, 64)
    model = torch.nn.Module()
    model.forward = other
    explained = str(onepass.explain(other, x, device="h200"))
    assert "snake" not in explained


# --- what is checked


def refused(match, name="wrong", **arguments):
    before = onepass.defined_words()
    with pytest.raises(onepass.WordError, match=match) as error:
        onepass.define_word(name, **arguments)
    assert onepass.defined_words() == before
    if name not in before:
        with pytest.raises(onepass.LineError):
            onepass.Line(f"{name}")
    return str(error.value)


def test_what_does_not_compile_is_shown_at_its_line():
    source = """
        template <class L> static L forward(L x) {
          const L y = x * x;
          return y * no_such_thing;
        }
    """
    message = refused("does not compile", source=source, reference=torch.square)
    assert "wrong, line 3: error: " in message and "no_such_thing" in message
    lines = message.splitlines()
    at = next(i for i, line in enumerate(lines) if "return y * no_such_thing;" in line and "error" not in line)
    assert lines[at + 1].index("^") == lines[at].index("no_such_thing")


def test_what_is_not_its_reference():
    refused(
        r"is not its reference on cpu, torch.float64: at x = .* expected .*, got",
        source="template <class L> static L forward(L x) { return x * x * 1.001; }",
        reference=torch.square,
    )


SQUARE = "template <class L> static L forward(L x) { return x * x; }"
TIMES = "template <class L> static L forward(L x, scalar a) { return x * a; }"


@pytest.mark.parametrize(
    ("formula", "says"),
    [
        ("tanh(x) * 3", "the formula 'tanh(x) * 3' is not that of the reference of 'wrong': at x = "),
        ("x * x + 0.001", "expected .*, got"),
        ("x * abs(x)", "expected .*, got -"),
        ("log(x) * x", "got nan"),
        ("softmax(x)", r"fails: softmax[\s\S]*dim"),
        ("linear(x, x)", "fails|expected it to give a tensor of x's shape"),
    ],
)
def test_formulas_are_compared_with_the_reference(formula, says):
    """`fuse` would put the word in their place."""
    refused(
        re.escape(says) if "(" in says else says,
        source=SQUARE,
        reference=torch.square,
        formulas=["x * x", "square(x)", formula],
    )


def test_formulas_have_the_references_gradient():
    def straight_through(x):
        return x + (x * x - x).detach()

    refused("the gradient of the formula 'x [*] x'", source=SQUARE, reference=straight_through, formulas=["x * x"])


def test_formulas_are_compared_with_other_numbers_than_the_example():
    refused(
        "the formula .* a = 1.4 expected",
        **{"source": TIMES, "parameters": ["a"], "example": [1.0]},
        **{"reference": lambda x, a: x * a, "formulas": ["x * a", "x * a ** 2"]},
    )


def test_what_is_not_the_derivative():
    refused(
        "the gradient of 'wrong' on cpu is not its derivative: that of x at x = (.*) is \\1, not [-0-9.]+$",
        source="""
            template <class L> static L forward(L x) { return x * x; }
            template <class L> static L backward(L x, L dy) { return x * dy; }
        """,
        reference=torch.square,
    )


def test_which_operands_gradient_is_not_the_derivative():
    message = refused(
        "the gradient of 'wrong' on cpu is not its derivative: that of u at x = .*, u = .* is .*, not",
        source="""
            template <class L> static L forward(L x, L u) { return x * u; }
            template <class L> static gradients<L> backward(L x, L dy, L u) { return {dy * u, dy * u}; }
        """,
        reference=torch.mul,
        operand="tensor",
    )
    assert len(message.splitlines()) == 1


def test_a_branch_on_a_vector():
    refused(
        "no branch .*: where",
        source="template <class L> static L forward(L x) { if (x > 0) return x; return x * x; }",
        reference=lambda x: torch.where(x > 0, x, x * x),
    )


def test_signatures():
    refused("has no function 'forward'", source="int x;", reference=torch.square)
    refused(
        "does not compile",
        source="template <class L> static L forward(L x, scalar a, scalar b) { return x; }",
        parameters=["a"],
        reference=lambda x, a: x,
    )
    refused(
        "expected reference to give a tensor of x's shape",
        source="template <class L> static L forward(L x) { return x; }",
        reference=lambda x: x.sum(),
    )
    refused(
        "the reference of 'wrong' is nan at x = -",
        source="template <class L> static L forward(L x) { return log(x); }",
        reference=torch.log,
    )


def test_arguments():
    good = {"source": "template <class L> static L forward(L x) { return x; }", "reference": lambda x: x}
    for name, wrong, match in (
        ("gelu", {}, "'gelu' is a word of onepass"),
        ("no word", {}, "expected name to be letters"),
        ("wrong", {"operand": "matrix"}, "expected operand to be None, 'column' or 'tensor', but got 'matrix'"),
        ("wrong", {"parameters": ["x"]}, "expected parameters to be names other than x"),
        ("wrong", {"parameters": ["a"], "example": [1, 2]}, "expected example to have 1 numbers"),
        ("wrong", {"domain": (1, 1)}, "expected domain to be"),
        ("wrong", {"flops": (0, 1)}, "expected flops to be two positive integers"),
        ("wrong", {"formulas": ["x +"]}, "expected a formula, but got 'x [+]'"),
        ("wrong", {"formulas": ["x + y"]}, "expected a formula of x"),
        ("wrong", {"formulas": ["x.sin()"]}, "expected a formula of x"),
        ("wrong", {"formulas": ["x + 1"], "parameters": ["a"]}, "expected a formula with a"),
    ):
        with pytest.raises(ValueError, match=match):
            onepass.define_word(name, **{**good, **wrong})
    for wrong, match in (
        ({"source": 3}, "argument 'source' must be str, not int"),
        ({"reference": 3}, "argument 'reference' must be callable, not int"),
    ):
        with pytest.raises(TypeError, match=match):
            onepass.define_word("wrong", **{**good, **wrong})


def test_defined_again_and_undefined():
    x = torch.randn(3, 9)
    twice = {"source": "template <class L> static L forward(L x) { return 2 * x; }", "reference": lambda x: 2 * x}
    thrice = {"source": "template <class L> static L forward(L x) { return 3 * x; }", "reference": lambda x: 3 * x}
    onepass.define_word("multiple", **twice)
    assert torch.equal(onepass.fused("multiple | relu", x), (2 * x).relu())
    onepass.define_word("multiple", **thrice)
    assert torch.equal(onepass.fused("multiple | relu", x), (3 * x).relu())
    assert torch.equal(onepass.functional.bias_act(x, torch.zeros(9), "multiple"), 3 * x)
    refused("not its reference", name="multiple", **{**twice, "reference": lambda x: x})
    assert torch.equal(onepass.fused("multiple | relu", x), (3 * x).relu())  # as before
    onepass.undefine_word("multiple")
    with pytest.raises(onepass.LineError, match="unknown word 'multiple'"):
        onepass.fused("multiple | relu", x)
    with pytest.raises(ValueError, match="expected a word that define_word has added, but got 'gelu'"):
        onepass.undefine_word("gelu")


EVERYTHING = """
    template <class L> static L forward(L x) {
      const L p = abs(x) + 0.5;
      const L first = exp(-p) + expm1(0.1 * x) + log(p) + log1p(p) + sin(x) * cos(2 * x) + tanh(x) - sigmoid(-x);
      const L second = erf(x) * normal_cdf(x) + normal_part(x) + sqrt(p) + rsqrt(p) + reciprocal(p) + pow(p, 1.5);
      const L third = where(x < 1, max(x, -2), min(0.5 * x, 3)) + copy_sign(p, x) + fma(x, p, x) + floor(0.5 + 0 * x);
      return first - second / (third * third + 3);
    }
"""


def everything(x):
    p = x.abs() + 0.5
    first = torch.exp(-p) + torch.expm1(0.1 * x) + p.log() + p.log1p() + x.sin() * (2 * x).cos()
    first = first + x.tanh() - torch.sigmoid(-x)
    second = x.erf() * torch.special.ndtr(x) + x * torch.special.ndtr(x) + p.sqrt() + p.rsqrt() + 1 / p + p**1.5
    third = torch.where(x < 1, x.clamp_min(-2), (0.5 * x).clamp_max(3)) + p.copysign(x) + x * p + x
    return first - second / (third * third + 3)


@pytest.mark.parametrize("device", DEVICES)
def test_every_function_and_its_derivative(device):
    """define_word compares values, and gradients by finite differences."""
    onepass.define_word("everything", source=EVERYTHING, reference=everything)
    x = torch.linspace(-6, 6, 1001, dtype=torch.float64, device=device, requires_grad=True)
    y = onepass.fused("everything", x)
    torch.testing.assert_close(y, everything(x), rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(f.sum(), x)[0] for f in (y, everything(x)))
    smooth = (x.detach() - torch.tensor([-2.0, 0, 1, 6], dtype=torch.float64, device=device)[:, None]).abs().min(0)[0]
    torch.testing.assert_close(ours[smooth > 1e-6], theirs[smooth > 1e-6], rtol=1e-10, atol=1e-10)
    onepass.undefine_word("everything")


# --- the command, packages, processes


def test_the_command(tmp_path):
    runner = CliRunner()
    made = runner.invoke(app, ["word", "new", "my_word", "--directory", str(tmp_path)])
    assert made.exit_code == 0 and (tmp_path / "my_word.py").exists()
    assert runner.invoke(app, ["word", "new", "my_word", "--directory", str(tmp_path)]).exit_code == 2
    checked = runner.invoke(app, ["word", "check", str(tmp_path / "my_word.py")])
    assert checked.exit_code == 0, checked.output
    assert "my_word" in checked.output and "bfloat16" in checked.output
    text = (tmp_path / "my_word.py").read_text().replace("sigmoid(a * x);", "sigmoid(a + x);", 1)
    (tmp_path / "my_word.py").write_text(text)
    wrong = runner.invoke(app, ["word", "check", str(tmp_path / "my_word.py")])
    assert wrong.exit_code == 1 and "is not its reference" in wrong.output
    (tmp_path / "none.py").write_text("x = 1\n")
    assert runner.invoke(app, ["word", "check", str(tmp_path / "none.py")]).exit_code == 1
    onepass.undefine_word("my_word")


def test_a_package_ships_words(monkeypatch):
    calls = []

    class Point:
        name, value = "shipped", "package:define_shipped"

        def load(self):
            return lambda: calls.append(1) or onepass.define_word("shipped", **{**PRELU, "operand_name": "w"})

    monkeypatch.setattr(
        vocabulary.metadata, "entry_points", lambda group: [Point()] if group == vocabulary.ENTRY_POINTS else []
    )
    x, w = torch.randn(4, 8), torch.rand(8)
    assert torch.equal(onepass.fused("bias | shipped", x, w, w), torch.where(x + w > 0, x + w, w * (x + w)))
    onepass.fused("shipped | bias", x, w, w)
    assert calls == [1]
    onepass.undefine_word("shipped")


def test_another_process_finds_it_compiled(tmp_path):
    (tmp_path / "word.py").write_text(
        "import onepass, torch, time\n"
        "onepass.define_word('cached', source='template <class L> static L forward(L x) { return x * 0.123; }',\n"
        "                    reference=lambda x: x * 0.123)\n"
        "print(onepass.defined_words()['cached'].report.compile_seconds['cpu'])\n"
    )
    command, own = [sys.executable, tmp_path / "word.py"], {**os.environ, "ONEPASS_CACHE_DIR": str(tmp_path / "cache")}
    seconds = [
        float(subprocess.run(command, env=own, capture_output=True, check=True, text=True).stdout) for _ in range(2)
    ]
    assert seconds[1] < seconds[0] / 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["sin", "cos", "log", "sqrt", "exp", "tanh", "sigmoid", "erf"])
def test_functions_on_cuda_err_as_little_as_promised(name):
    """Over floats of all magnitudes; docs/own-words.md."""
    onepass.define_word(
        "swept",
        source=f"template <class L> static L forward(L x) {{ return {name}(x); }}",
        reference=getattr(torch, name),
        domain=(0.5, 4.0),
    )
    bits = torch.arange(0, 2**31, 1021, dtype=torch.int64, device="cuda").to(torch.int32)
    x = bits.view(torch.float32)
    x = torch.cat((x, -x))[torch.cat((x, x)).isfinite()]
    exact, ours = getattr(torch, name)(x.double()), onepass.fused("swept", x)
    onepass.undefine_word("swept")
    assert torch.equal(exact.isnan(), ours.isnan())
    counted = exact.isfinite() & (exact.abs() > torch.finfo(torch.float32).tiny) & (exact.abs() < 3.4e38)
    unit = torch.exp2(torch.floor(torch.log2(exact.abs())) - 23)
    ulps = ((ours.double() - exact).abs() / unit)[counted].max().item()
    assert ulps <= {"sqrt": 0.51, "sigmoid": 4, "tanh": 3, "erf": 3}.get(name, 2), f"{name}: {ulps:.2f} ULP"
