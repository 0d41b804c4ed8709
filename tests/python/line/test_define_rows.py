"""A user's own row words and endings: what is summed over a row and what is made of it, the gradient derived."""

import pytest
import torch

import onepass
from helpers import check_line, make_inputs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
ENERGY = {
    "kind": "row",
    "parameters": ["eps"],
    "source": """
        template <class L> static L sum(L x, scalar eps) { return x * x; }
        template <class L> static L forward(L x, scalar sum, scalar n, scalar eps) { return x / (sum / n + eps); }
    """,
    "reference": lambda x, eps: x / (x.square().mean(-1, keepdim=True) + eps),
}
STANDARD = {  # of two sums
    "kind": "row",
    "parameters": ["power", "eps"],
    "source": """
        template <class L> static L sum(L x, scalar power, scalar eps) { return x; }
        template <class L> static L second_sum(L x, scalar power, scalar eps) { return x * x; }
        template <class L>
        static L forward(L x, scalar sum, scalar second_sum, scalar n, scalar power, scalar eps) {
          const L mean = sum / n;
          return (x - mean) * pow(second_sum / n - mean * mean + eps, -power);
        }
    """,
    "reference": lambda x, power, eps: (
        (x - x.mean(-1, keepdim=True)) * (x.var(-1, correction=0, keepdim=True) + eps).pow(-power)
    ),
    "example": [0.5, 0.1],
}
ROOT = {
    "kind": "ending",
    "source": """
        template <class L> static L sum(L x) { return x * x; }
        static scalar number(scalar sum, scalar n) { return sqrt(sum / n); }
    """,
    "reference": lambda x: x.square().mean(-1).sqrt(),
}
PARTICIPATION = {  # of two sums
    "kind": "ending",
    "parameters": ["eps"],
    "source": """
        template <class L> static L sum(L x, scalar eps) { return x * x; }
        template <class L> static L second_sum(L x, scalar eps) { return x * x * x * x; }
        static scalar number(scalar sum, scalar second_sum, scalar n, scalar eps) {
          return sum * sum / (second_sum + eps);
        }
    """,
    "reference": lambda x, eps: x.square().sum(-1).square() / (x.pow(4).sum(-1) + eps),
}
WORDS = {"energy_norm": ENERGY, "standard": STANDARD, "own_root": ROOT, "participation": PARTICIPATION}


@pytest.fixture(scope="module", autouse=True)
def words():
    for name, word in WORDS.items():
        onepass.define_word(name, **word)
    yield
    for name in WORDS:
        onepass.undefine_word(name)


LINES = (
    "energy_norm(0.1) | scale | gelu",
    "bias | dropout(0.2) | add | keep | standard(0.5, 1e-3) | scale | rms_norm(0.1) | energy_norm(0.1) | scale",
    "energy_norm(0.1) | scale | linear | bias",
    "bias | own_root | participation(0.1)",
    "tanh | keep | energy_norm(0.1) | logsumexp | participation(0.1)",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("device", DEVICES)
def test_error_is_no_more_than_pytorchs(line, dtype, device):
    for shape in ((3, 7, 65), (5, 1), (2, 1000)):
        check_line(line, make_inputs(line, shape, dtype, device), slack=3.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("line", LINES[1:2] + LINES[3:])
def test_gradients_once_and_twice(line, device):
    inputs = make_inputs(line, (3, 5), torch.float64, device)

    def of(*tensors):
        torch.manual_seed(3)
        return onepass.fused(line, *tensors)

    assert torch.autograd.gradcheck(of, inputs.tensors)
    assert torch.autograd.gradgradcheck(of, inputs.tensors)


def test_in_the_vocabulary():
    words = {word.name: word for word in onepass.words()}
    assert words["energy_norm"].kind == words["own_root"].kind == "row"
    assert "gives_number" in words["own_root"].properties and words["standard"].parameter_name == "power, eps"
    assert onepass.defined_words()["standard"].sums == 2 and onepass.defined_words()["own_root"].sums == 1
    with pytest.raises(onepass.LineError, match="'gelu' behind 'own_root', which ends a line"):
        onepass.Line("own_root | gelu")
    with pytest.raises(onepass.LineError, match="activation"):
        onepass.Line("gate(energy_norm(1))")


def test_rows_of_nothing():
    """The reference says what there is."""
    assert onepass.fused("participation(0.5)", torch.empty(3, 0)).tolist() == [0, 0, 0]
    assert onepass.fused("own_root", torch.empty(2, 0)).isnan().all()  # the mean of nothing
    assert onepass.fused("energy_norm(1)", torch.empty(3, 0)).shape == (3, 0)
    assert onepass.fused("own_root", torch.empty(0, 4)).shape == (0,)


@pytest.mark.parametrize("device", DEVICES)
def test_transforms(device):
    x = torch.randn(4, 6, 40, device=device, requires_grad=True)
    w = torch.randn(40, device=device, requires_grad=True)

    def of(x, w):
        y, root = onepass.fused("scale | keep | energy_norm(0.1)", x, w)
        return y.sum(-1) + onepass.fused("own_root", root)

    expected = of(x, w)
    torch.testing.assert_close(torch.compile(of, fullgraph=True, backend="aot_eager")(x, w), expected)
    torch.testing.assert_close(torch.vmap(of, (0, None))(x, w), expected)
    got = torch.func.grad(lambda x: of(x, w).sum())(x)
    torch.testing.assert_close(got, torch.autograd.grad(expected.sum(), x)[0])
    pieces = onepass.fused("own_root", [x[0], x[1, :2]])
    torch.testing.assert_close(pieces[1], onepass.fused("own_root", x[1, :2]))


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        ("has no function 'sum'", {"source": "template <class L> static L forward(L x, scalar s, scalar n);"}),
        ("has no function 'forward'", {"source": "template <class L> static L sum(L x, scalar eps);"}),
        ("has no function 'number'", {"kind": "ending"}),
        ("is not its reference on cpu", {"reference": lambda x, eps: x / (x.square().sum(-1, keepdim=True) + eps)}),
        ("expected reference to give a tensor of x's shape", {"reference": lambda x, eps: x.sum(-1)}),
        ("does not compile", {"source": ENERGY["source"].replace("scalar n,", "")}),
    ],
)
def test_what_is_checked(match, changes):
    with pytest.raises(onepass.WordError, match=match):
        onepass.define_word("wrong", **{**ENERGY, **changes})
    assert "wrong" not in onepass.defined_words()


def test_an_ending_gives_one_number_a_row():
    with pytest.raises(onepass.WordError, match=r"one number a row, shape \[5\], but got \[5, 67\]"):
        onepass.define_word("wrong", **{**ROOT, "reference": lambda x: x})
    with pytest.raises(onepass.WordError, match=r"is not its reference on cpu, torch.float64: at row \d"):
        onepass.define_word("wrong", **{**ROOT, "reference": lambda x: x.square().sum(-1).sqrt()})


def test_arguments():
    for changes, match in (
        ({"kind": "column"}, "expected kind to be 'elementwise', 'row' or 'ending', but got 'column'"),
        ({"operand": "column"}, "operand is for elementwise words, but got 'column' with kind 'row'"),
        ({"formulas": ["x + eps"]}, "formulas and targets are for elementwise words"),
    ):
        with pytest.raises(ValueError, match=match):
            onepass.define_word("wrong", **{**ENERGY, **changes})
