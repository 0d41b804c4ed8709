"""Tensors that a model makes of Python's numbers."""

import torch

from onepass.rewrite.constants import fill_constants


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
