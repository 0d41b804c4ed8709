"""Rows sorted by expert and sorted back: their gradients are gathered where the graph shows a permutation."""

import pytest
import torch

import onepass
from captures import captured
from onepass.graph.operations import leave_apart
from onepass.rewrite.routing import gather_back, gathered, inverse_of

TIMES = 2


def by_writing(permutation):
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(permutation.size(0), device=permutation.device)
    return inverse


def routed(x, weights, experts, inverse=by_writing, sort=lambda ids: torch.sort(ids)[1], after=lambda rows: rows):
    """As transformers write experts whose products are grouped."""
    permutation = sort(experts.reshape(-1))
    rows = after(x[permutation // TIMES]).tanh()
    rows = rows * weights.reshape(-1)[permutation].unsqueeze(-1)
    return rows[inverse(permutation)].view(-1, TIMES, x.shape[-1]).sum(dim=1)


def sorted_by_number(x, weights, experts):
    return routed(x, weights, experts, torch.argsort, lambda ids: ids.argsort())


def masked(x, weights, experts):
    return routed(x, weights, experts, after=lambda rows: rows.masked_fill_(rows > 1, 0.0))


def in_order_and_given(x, weights, experts):
    permutation = experts.reshape(-1).argsort(stable=True)
    return x[permutation // TIMES], permutation, inverse_of(permutation)


def tensors(dtype=torch.float32):
    torch.manual_seed(0)
    x, weights = torch.randn(6, 5, dtype=dtype).requires_grad_(), torch.randn(6, TIMES, dtype=dtype).requires_grad_()
    return x, weights, torch.randint(0, 3, (6, TIMES))


def outcome(function, inputs):
    leaves = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(1)
    differentiable = [t for t in results if t.requires_grad]
    upstream = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in differentiable]
    gradients = torch.autograd.grad(differentiable, [t for t in leaves if t.requires_grad], upstream, allow_unused=True)
    return [t for t in (*results, *gradients) if t is not None]


def calls(function, *inputs):
    """Names of what the graph calls afterwards."""
    graph = captured(function, *inputs)
    leave_apart(graph)
    gather_back(graph)
    graph.lint()
    return [getattr(node.target, "__name__", node.target) for node in graph.nodes if node.op.startswith("call")]


def agree(function, inputs):
    torch._dynamo.reset()
    expected, found = (outcome(way, inputs) for way in (function, onepass.fuse(function)))
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize(
    ("function", "gathers"), [(routed, 3), (sorted_by_number, 3), (masked, 3), (in_order_and_given, 1)]
)
def test_permutations(function, gathers):
    names = calls(function, *tensors())
    assert names.count("gathered") == gathers
    agree(function, tensors())


def twice_given(x, weights, experts):
    permutation = torch.argsort(experts.reshape(-1))
    inverses = torch.argsort(permutation), torch.argsort(permutation)
    return x[permutation // TIMES], *inverses


def test_orders_that_are_given_are_memory_of_their_own():
    x, weights, experts = tensors()
    _, first, second = onepass.fuse(twice_given)(x, weights, experts)
    assert first.data_ptr() != second.data_ptr() and torch.equal(first, second)
    agree(twice_given, tensors())


def test_what_a_caller_overwrites():
    """PyTorch saves the index of each of them, and the permutation of none."""
    for function, raises in (
        (lambda x, w, e: (lambda p: (x[p // TIMES], p))(torch.argsort(e.reshape(-1))), False),
        (lambda x, w, e: (lambda p: (w.reshape(-1)[torch.argsort(p)], p))(torch.argsort(e.reshape(-1))), False),
        (lambda x, w, e: (lambda r: (x[r], r))(torch.argsort(e.reshape(-1)) // TIMES), True),
    ):
        torch._dynamo.reset()
        for way in (function, onepass.fuse(function)):
            result, given = way(*tensors())
            given.zero_()
            if raises:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    result.sum().backward()
            else:
                result.sum().backward()


def test_second_derivatives_of_batched_gradients():
    def function(x):
        return x[torch.argsort(torch.tensor([2, 0, 1]))] ** 3

    outcomes = []
    for way in (function, onepass.fuse(function)):
        x = torch.arange(1.0, 4.0, requires_grad=True)
        (gradients,) = torch.autograd.grad(way(x), x, torch.eye(3), is_grads_batched=True, create_graph=True)
        outcomes.append(torch.autograd.grad(gradients.square().sum() + x.sum(), x)[0])
    torch.testing.assert_close(*reversed(outcomes))


def test_no_features():
    x = torch.randn(6, 0, requires_grad=True)
    experts = torch.randint(0, 3, (12,))
    onepass.fuse(lambda x, e: x[torch.argsort(e) // TIMES] * 1.0)(x, experts).sum().backward()
    assert x.grad.shape == x.shape


def test_a_descending_order_is_no_inverse():
    assert calls(descending, *tensors()).count("argsort") == 2
    agree(descending, tensors())


def test_the_inverse_is_made_once():
    names = calls(routed, *tensors())
    assert names.count("inverse_of") == 1 and not {"setitem", "empty_like", "arange"} & set(names)
    names = calls(sorted_by_number, *tensors())
    assert names.count("inverse_of") == 1 and names.count("argsort") == 1


def not_all_rows(x, weights, experts):
    return x[experts.reshape(-1).argsort() // 3]


def no_permutation(x, weights, experts):
    return x[torch.topk(weights.reshape(-1), 4)[1] // TIMES]


def of_a_matrix(x, weights, experts):
    return x[torch.sort(experts, dim=0)[1][:, 0]]


def overwritten(x, weights, experts):
    permutation = torch.sort(experts.reshape(-1))[1]
    rows = x[permutation // TIMES]
    permutation.zero_()
    return rows


def another_number_is_written(x, weights, experts):
    permutation = torch.sort(experts.reshape(-1))[1]
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(permutation))
    inverse[0] = 0
    return weights.reshape(-1)[inverse]


def descending(x, weights, experts):
    permutation = torch.argsort(experts.reshape(-1))
    return weights.reshape(-1)[torch.argsort(permutation, descending=True)]


def inverse_written(x, weights, experts):
    inverse = torch.argsort(torch.argsort(experts.reshape(-1)))
    rows = weights.reshape(-1)[inverse.add_(0)]
    return rows, inverse


def divided_written(x, weights, experts):
    rows = torch.argsort(experts.reshape(-1)) // TIMES
    rows[0] = 3
    return x[rows]


def counts_written(x, weights, experts):
    permutation = torch.argsort(experts.reshape(-1))
    inverse, places = torch.empty_like(permutation), torch.arange(permutation.shape[0])
    places.sub_(1).clamp_(min=0)
    inverse[permutation] = places
    return weights.reshape(-1)[inverse]


def sorted_in_inference_mode(x, weights, experts):
    with torch.inference_mode():
        permutation = torch.argsort(experts.reshape(-1))
    return x[permutation // TIMES]


def never_filled(x, weights, experts):
    permutation = torch.argsort(experts.reshape(-1) * 0 + 1)
    torch.empty_like(permutation)
    return x[permutation[:6]]


def counted_otherwise(x, weights, experts):
    permutation = torch.sort(experts.reshape(-1))[1]
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(1, len(permutation) + 1) - 1
    return weights.reshape(-1)[inverse]


@pytest.mark.parametrize(
    "function",
    [
        *(not_all_rows, no_permutation, of_a_matrix, overwritten, another_number_is_written, counted_otherwise),
        *(inverse_written, never_filled, divided_written, counts_written, sorted_in_inference_mode),
    ],
)
def test_left_alone(function):
    assert "gathered" not in calls(function, *tensors())
    agree(function, tensors())


def test_of_what_needs_no_gradient():
    x, weights, experts = tensors()
    assert calls(routed, x.detach(), weights.detach(), experts).count("gathered") == 0


@pytest.mark.parametrize("times", [1, 2])
def test_derivatives(times):
    torch.manual_seed(0)
    permutation = torch.randperm(6)
    inverse = inverse_of(permutation)
    assert torch.equal(permutation[inverse], torch.arange(6))
    x = torch.randn(6 // times, 3, dtype=torch.float64, requires_grad=True)

    def function(x):
        return gathered(x, permutation // times, inverse, times)

    assert torch.equal(function(x), x[permutation // times])
    torch.autograd.gradcheck(function, x, check_forward_ad=True, check_batched_grad=True)
    torch.autograd.gradgradcheck(function, x)


def test_within_levels_of_torch_func():
    """Of what they do not wrap, too, with which torch.vmap calls no function of autograd."""
    x, weights, experts = tensors()

    def batched(x, weights, experts):
        rows = torch.func.vmap(lambda t: routed(t, weights, experts))(torch.stack([x, x.cos()])).sum(0)
        return rows + torch.func.grad(lambda t: routed(t, weights, experts).square().sum())(x)

    agree(batched, (x, weights, experts))
