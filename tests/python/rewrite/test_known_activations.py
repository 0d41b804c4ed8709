"""An activation of the vocabulary is one in models: `fuse`, `explain`, the stacks and the prices know it by its
descriptor and its entry in `onepass.reference` alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
from helpers import OF_POSITIVE, shown, words_of
from onepass.pricing.saved import _saved_by_activation
from onepass.reference import ACTIVATIONS, IN_TORCH
from onepass.rewrite import fuse as fusing

MODULES = {
    "relu": nn.ReLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "softplus": nn.Softplus(),
    "mish": nn.Mish(),
    "hardswish": nn.Hardswish(),
    "elu(0.5)": nn.ELU(0.5),
    "leaky_relu(0.2)": nn.LeakyReLU(0.2),
    "softsign": nn.Softsign(),
}


@pytest.fixture(autouse=True)
def every_line(monkeypatch):
    """Tests' tensors are small: whatever a line can say becomes one, the longest first."""
    monkeypatch.setattr(fusing, "gain_of", lambda chain, *_, **__: float(len(chain.nodes)))
    torch._dynamo.reset()


class Biased(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.bias, self.activation = nn.Parameter(torch.randn(64)), activation

    def forward(self, x):
        return self.activation(x + self.bias)


def check_fused(activation, word, of_positive=False):
    """The one line, its result, and the gradients."""
    model, x = Biased(activation), torch.randn(8, 64)
    if of_positive:
        model.bias.data.abs_()
        x = x.abs() + 0.1
    x.requires_grad_()
    theirs = model(x)
    wanted = torch.autograd.grad(theirs.sum(), (x, model.bias))
    fused = onepass.fuse(model)
    ours = fused(x)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), (x, model.bias)), wanted)
    assert [line.line for line in onepass.report(fused).lines] == [f"bias | {word}"]


@pytest.mark.parametrize("word", MODULES)
def test_modules(word):
    check_fused(MODULES[word], word)


def calls():
    for name, word in IN_TORCH.items():
        for target in word.targets if name in ACTIVATIONS else ():
            if name != "gelu_tanh" and not str(getattr(target, "__name__", target)).endswith(("_", "clamp_min")):
                yield pytest.param(name, target, id=f"{name}-{getattr(target, '__name__', target)}")


@pytest.mark.parametrize(("name", "target"), calls())
def test_functions_and_methods(name, target):
    given = {"pow": (3.0,), "clamp": (-0.5, 1.0)}.get(name, ())
    function = (lambda x, *given: getattr(x, target)(*given)) if isinstance(target, str) else target
    numbers = IN_TORCH[name].numbers(*given)
    word = f"{name}({', '.join(map(repr, numbers))})" if numbers else name
    check_fused(lambda x: function(x, *given), word, name in OF_POSITIVE)


def test_numbers_by_name():
    check_fused(lambda x: F.leaky_relu(x, negative_slope=0.3), "leaky_relu(0.3)")
    check_fused(lambda x: F.gelu(input=x, approximate="tanh"), "gelu_tanh")
    check_fused(lambda x: x.clamp(min=0.25), "clamp(0.25, inf)")
    check_fused(lambda x: x.clamp(max=0.25), "clamp(-inf, 0.25)")
    check_fused(lambda x: torch.clamp_min(x, 0.25), "clamp(0.25, inf)")
    check_fused(lambda x: x**2, "pow(2.0)")


def test_softcap():
    """As Gemma writes it."""
    check_fused(lambda x: 30.0 * torch.tanh(x / 30.0), "softcap(30.0)")
    check_fused(lambda x: torch.tanh(x / 50) * 50, "softcap(50.0)")


def test_what_is_no_number_is_no_word():
    """A power of a tensor, and bounds that are tensors."""
    exponent = torch.full((64,), 2.0)
    for function in (lambda x: x**exponent, lambda x: 2**x, lambda x: x.clamp(exponent, 2 * exponent)):
        fused = onepass.fuse(Biased(function))
        fused(torch.randn(8, 64))
        assert not any("pow" in line.line or "clamp" in line.line for line in onepass.report(fused).lines)


@pytest.mark.parametrize(
    "activation", [nn.Softsign(), F.softsign, lambda x: x / (1 + x.abs())], ids=["nn", "F", "by hand"]
)
def test_softsign(activation):
    """Added to the vocabulary by two files of the product."""
    check_fused(activation, "softsign")
    explained = onepass.explain(Biased(activation), torch.randn(512, 64), device="h200")
    assert ["bias | softsign"] == [advice.line for advice in explained.lines]


def test_softsign_costs_what_pytorch_runs():
    """Three kernels."""
    x = torch.randn(4096, 1024)

    def operators(function):
        return onepass.explain(function, x.clone().requires_grad_(), device="h200").operators

    (softsign,) = operators(F.softsign)
    by_hand = operators(lambda x: x / (x.abs() + 1))
    assert softsign.name == "softsign" and softsign.line is not None
    assert softsign.forward.kernels == sum(o.forward.kernels for o in by_hand) == 3
    assert softsign.forward.bytes == sum(o.forward.bytes for o in by_hand)


def test_stacks_of_pieces():
    """Softsign of every piece is softsign of all."""

    def pieces(x):
        return torch.stack([F.softsign(F.layer_norm(part, part.shape[-1:])) for part in x.chunk(4)])

    x = torch.randn(32, 64)
    model = nn.Module()
    model.forward = pieces
    fused = onepass.fuse(model)
    torch.testing.assert_close(fused(x), pieces(x))
    assert [line.line for line in onepass.report(fused).lines] == ["layer_norm(1e-05) | softsign"]


def test_what_pytorch_saves():
    saved = {name: tuple(_saved_by_activation(f, words_of(shown(name))[0].numbers)) for name, f in ACTIVATIONS.items()}
    of_result = {"relu", "tanh", "sigmoid"}
    for name in MODULES:
        name = name.partition("(")[0]
        if name != "softsign":
            assert saved[name] == (name not in of_result, name in of_result, 0), name
    assert saved["softsign"] == (True, False, 1)  # |x| + 1


def test_every_activation_has_an_entry():
    assert {word.name for word in onepass.words() if word.kind == "activation"} == set(ACTIVATIONS)
    assert {word.name for word in onepass.words()} == set(IN_TORCH)
