"""What torch's FlopCounterMode counts of lines: what it counts of torch's own operators."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import onepass
import onepass.functional as F
from helpers import as_tuple

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo")
TF = torch.nn.functional


def flops_of(call, tensors, *, gradients=True):
    with FlopCounterMode(display=False) as counter:
        results = as_tuple(call(*tensors))
        forward = counter.get_total_flops()
        if gradients:
            sum(r.sum() for r in results).backward()
    return forward, counter.get_total_flops() - forward


def leaves(*shapes, frozen=()):
    return [torch.randn(shape, requires_grad=i not in frozen) for i, shape in enumerate(shapes)]


LINEAR = {
    "linear": (lambda x, w, b: F.linear(x, w, b, activation="gelu"), lambda x, w, b: TF.gelu(TF.linear(x, w, b))),
    "norm and linear": (
        lambda x, w, b: F.rms_norm_linear(x, None, w, b, 1e-6),
        lambda x, w, b: TF.linear(TF.rms_norm(x, x.shape[-1:], None, 1e-6), w, b),
    ),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("features", [4, 40])
@pytest.mark.parametrize("frozen", [(), (0,), (1,)], ids=["all", "not x", "not the matrix"])
@pytest.mark.parametrize("name", LINEAR)
def test_linear(name, frozen, features):
    ours, theirs = LINEAR[name]
    tensors = leaves((3, 5, 16), (features, 16), (features,), frozen=frozen)
    forward, backward = flops_of(ours, tensors)
    assert forward == 2 * 15 * 16 * features
    assert (forward, backward) == flops_of(theirs, tensors)
    with torch.no_grad():
        assert flops_of(ours, tensors, gradients=False) == (forward, 0)


@pytest.mark.usefixtures("way")
def test_attention():
    tensors = leaves((2, 2, 16, 8), (2, 2, 24, 8), (2, 2, 24, 4))
    forward, backward = flops_of(onepass.Line("scores | mul(0.3) | softmax | values"), tensors)
    assert (forward, backward) == (2 * 64 * 24 * (8 + 4), 2 * 64 * 24 * (3 * 8 + 2 * 4))
    forward, backward = flops_of(onepass.Line("scores | mul(0.3) | softmax"), tensors[:2])
    assert (forward, backward) == (2 * 64 * 24 * 8, 2 * 2 * 64 * 24 * 8)


def test_attention_as_torchs_engine():
    """Two products forward and five backward, which makes the scores again. (Torch 2.11 counts none on the CPU.)"""

    def theirs(q, k, v):
        return TF.scaled_dot_product_attention(q, k, v)

    tensors, product = leaves(*3 * [(2, 4, 64, 32)]), 2 * 2 * 4 * 64 * 64 * 32
    assert flops_of(F.scaled_dot_product_attention, tensors) == (2 * product, 5 * product)
    assert flops_of(theirs, tensors) in ((2 * product, 5 * product), (0, 0))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("stack", [False, True], ids=["list", "stack"])
def test_a_list(stack):
    w, b = leaves((4, 16), (4,))
    xs = leaves(*3 * [(5, 16)])

    def call(w, b, *xs):
        results = onepass.fused("linear | bias | gelu", list(xs), w, b, stack=stack)
        return (results,) if stack else tuple(results)

    product = 2 * 3 * 5 * 16 * 4
    assert flops_of(call, [w, b, *xs]) == (product, 2 * product)


def test_compiled():
    call = torch.compile(LINEAR["linear"][0], backend="aot_eager")
    tensors = leaves((3, 5, 16), (40, 16), (40,))
    assert flops_of(call, tensors) == flops_of(LINEAR["linear"][1], tensors)


def test_modules():
    block = torch.nn.Sequential(onepass.nn.LayerNormLinear(16, 32), onepass.nn.LinearAct(32, 16, activation="silu"))
    plain = torch.nn.Sequential(
        torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 16), torch.nn.SiLU()
    )
    x = torch.randn(7, 16, requires_grad=True)
    assert flops_of(block, [x]) == flops_of(plain, [x])
