"""An activation of the vocabulary is one in models: `fuse`, `explain`, the stacks and the prices know it by its
descriptor and its entry in `onepass.reference` alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
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


def check_fused(activation, word):
    """The one line, its result, and the gradients."""
    model, x = Biased(activation), torch.randn(8, 64, requires_grad=True)
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
            if name != "gelu_tanh" and not str(getattr(target, "__name__", target)).endswith("_"):
                yield pytest.param(name, target, id=f"{name}-{getattr(target, '__name__', target)}")


@pytest.mark.parametrize(("name", "target"), calls())
def test_functions_and_methods(name, target):
    call = (lambda x: getattr(x, target)()) if isinstance(target, str) else target
    numbers = IN_TORCH[name].numbers()
    check_fused(call, f"{name}({numbers[0]})" if numbers else name)


def test_numbers_by_name():
    check_fused(lambda x: F.leaky_relu(x, negative_slope=0.3), "leaky_relu(0.3)")
    check_fused(lambda x: F.gelu(input=x, approximate="tanh"), "gelu_tanh")


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
    saved = {name: tuple(_saved_by_activation(f, ())) for name, f in ACTIVATIONS.items()}
    of_result = {"relu", "tanh", "sigmoid"}
    for name in MODULES:
        name = name.partition("(")[0]
        if name != "softsign":
            assert saved[name] == (name not in of_result, name in of_result, 0), name
    assert saved["softsign"] == (True, False, 1)  # |x| + 1


def test_every_activation_has_an_entry():
    assert {word.name for word in onepass.words() if word.kind == "activation"} == set(ACTIVATIONS)
    assert {word.name for word in onepass.words()} == set(IN_TORCH)
