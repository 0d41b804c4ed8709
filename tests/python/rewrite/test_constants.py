"""Tensors that a model makes of Python's numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import onepass
from onepass.graph.operations import leave_apart
from onepass.rewrite import constants as constants_module
from onepass.rewrite.constants import fill_constants, hold_constants


def captured(function, *given):
    """The result, and the functions that are called for it."""
    called = []

    def backend(gm, example_inputs):
        fill_constants(gm.graph)
        gm.graph.lint()
        gm.recompile()
        called.extend(node.target for node in gm.graph.nodes if node.op == "call_function")
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)(*given), called


def test_numbers_on_a_gpu_are_filled(cuda):
    def function(x):
        numbers = [torch.tensor(v, device="cuda") for v in (3, 2.5, True, -1e30)]
        numbers += [torch.tensor(-1e30, device=x.device, dtype=torch.float16)]  # infinity
        numbers += [torch.tensor(-1e4, dtype=x.dtype, device=x.device), torch.tensor(data=7, device=x.device)]
        return [torch.where(x > 0, number, x) for number in numbers]

    x = torch.randn(5, 6, device=cuda, dtype=torch.bfloat16)
    results, called = captured(function, x)
    torch.testing.assert_close(results, function(x))
    assert called.count(torch.tensor) == 1


def test_a_cache_that_is_empty(cuda):
    """As transformers' caches begin."""

    def function(x):
        keys = x.transpose(1, 2)
        joined = torch.cat([torch.tensor([], dtype=x.dtype, device=x.device), keys], dim=-2)
        joined[0] = 0
        return joined, keys * 2

    x = torch.randn(2, 3, 4, 5, device=cuda)
    expected = function(x.clone())
    results, called = captured(function, x.clone())
    torch.testing.assert_close(results, expected)
    assert [r.stride() for r in results] == [r.stride() for r in expected]
    assert torch.tensor not in called


def test_what_else_there_is_stays():
    def function(x):
        return x * torch.tensor(2.0), torch.tensor([1.0, 2.0]), torch.cat([torch.tensor([]), x])

    x = torch.randn(3)
    results, called = captured(function, x)
    torch.testing.assert_close(results, function(x))
    assert called.count(torch.tensor) == 3  # noqa: PLR2004


def window(x, size=3):
    """As models write a mask of what is near."""
    places = torch.arange(x.shape[-2], device=x.device)
    return (places[:, None] - places[None, :]).abs() < size


def attends(x):
    return F.scaled_dot_product_attention(x, x, x, attn_mask=window(x)) + window(x).sum()


def buckets(x):
    near = window(x).long()
    near += 1
    return x + near.sum(-1, keepdim=True), torch.arange(3) + 1


def gives_them(x):
    mask = window(x)
    return x.masked_fill(mask.any(-1, keepdim=True), 2.0), mask


def writes_them(x):
    places = torch.arange(4, dtype=x.dtype, device=x.device).repeat(2)
    places.mul_(2.0)
    return x + places[: x.shape[-1]]


def draws_them(x):
    return x + torch.rand(x.shape[-1], device=x.device)


def held(function, *inputs):
    """Two calls of a function that is fused, and how many constants its graph holds."""
    graphs = []

    def backend(gm, _):
        graphs.append(gm)
        leave_apart(gm.graph)
        hold_constants(gm)
        gm.graph.lint()
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    results = [compiled(*inputs) for _ in range(2)]
    (gm,) = graphs
    return results, sum(1 for _ in gm.buffers()), [n for n in gm.graph.nodes if n.target is torch.arange]


@pytest.mark.parametrize(("function", "count"), [(attends, 2), (buckets, 2), (gives_them, 1), (writes_them, 1)])
def test_what_depends_on_sizes_alone_is_held(function, count, device):
    x = torch.randn(2, 6, 8, device=device, requires_grad=True)
    results, constants, aranges = held(function, x)
    assert constants == count and not aranges  # what is written or given is made of one that is held
    for result in results:
        for found, expected in zip(tree_leaves(result), tree_leaves(function(x)), strict=True):
            torch.testing.assert_close(found, expected)
            assert found.stride() == expected.stride() and found._is_view() == expected._is_view()
        for found in tree_leaves(result):  # whoever is given it may write to it
            found.detach().zero_()


def test_what_is_drawn_is_drawn_in_each_call():
    (first, second), constants, _ = held(draws_them, torch.zeros(3))
    assert constants == 0 and not torch.equal(first, second)


def test_somebodys_operator_runs_in_each_call():
    calls = []

    @torch.library.custom_op("onepass_tests::counted", mutates_args=())
    def counted(n: int) -> torch.Tensor:
        calls.append(n)
        return torch.full((n,), float(len(calls)))

    @counted.register_fake
    def _(n):
        return torch.empty(n)

    results, constants, _ = held(lambda x: x + torch.ops.onepass_tests.counted(4), torch.zeros(4))
    assert constants == 0 and [result.tolist() for result in results] == [[1.0] * 4, [2.0] * 4]


def test_what_raises_raises_in_the_call():
    with pytest.raises(torch.linalg.LinAlgError):
        onepass.fuse(lambda x: x * torch.linalg.inv(torch.zeros(4, 4)))(torch.randn(4, 4))


def test_large_constants_are_made_in_each_call(monkeypatch):
    monkeypatch.setattr(constants_module, "LARGEST", 4)
    _, constants, aranges = held(attends, torch.randn(2, 6, 8))
    assert constants == 0 and len(aranges) == 2


def test_sizes_that_change_are_no_constants():
    torch._dynamo.reset()
    fused = onepass.fuse(attends, dynamic=True)
    for length in (6, 9, 12):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(fused(x), attends(x))


def test_constants_are_made_outside_of_inference_mode():
    torch._dynamo.reset()
    fused = onepass.fuse(attends)
    x = torch.randn(2, 6, 8)
    with torch.inference_mode():
        fused(x)
    leaf = x.clone().requires_grad_()
    fused(leaf).sum().backward()
    assert leaf.grad is not None
