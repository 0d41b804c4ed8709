"""What the rewriter knows of a captured graph's nodes: what they write, whether they draw, which share memory."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from captures import captured
from onepass.graph.effects import Memory, bodies, effects_of, memory_of, remove_unused


@torch.library.custom_op("onepass_tests::overwrite", mutates_args=("x",))
def overwrite(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return y * 2


@overwrite.register_fake
def _(x, y):
    return torch.empty_like(y)


X = torch.randn(4, 8)


def last(function, *inputs):
    """The node before the graph's output."""
    return [node for node in captured(function, *inputs).nodes if node.op in ("call_function", "call_method")][-1]


def writes_first(function, *inputs):
    """Whether the memory of the first input is written, and no other."""
    graph = captured(function, *inputs)
    first = next(node for node in graph.nodes if node.op == "placeholder")
    return frozenset().union(*(effects_of(n).writes for n in graph.nodes)) == memory_of(first.meta["example_value"])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.add_(1.0),
        lambda x: F.leaky_relu(x, 0.2, True),
        lambda x: F.elu(x, inplace=True),
        lambda x: F.dropout(x, 0.5, True, True),
        lambda x: torch._foreach_add_([x], 1.0),
        lambda x: torch.add(x, 1.0, out=x),
        lambda x: torch.clamp_(x, min=0.0),
        lambda x: x.view(-1)[3:5].zero_(),
        lambda x: x.detach().mul_(2.0),
        lambda x: x.index_copy_(0, torch.tensor([1]), torch.zeros(1, 8)),
        lambda x: overwrite(x, torch.ones(4, 8)),
        lambda x: x.__setitem__(0, 1.0),
        lambda x: torch.nn.init.constant_(x, 3.0),
    ],
)
def test_writes(function):
    assert writes_first(function, X.clone())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.add(1.0),
        lambda x: F.leaky_relu(x, 0.2),
        lambda x: torch._foreach_add([x], 1.0),
        lambda x: x.view(-1)[3:5],
        lambda x: F.layer_norm(x, (8,)),
        lambda x: torch.arange(4, device=x.device),
        lambda x: x.new_zeros(3),
    ],
)
def test_pure(function):
    assert effects_of(last(function, X)).none


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: torch.rand_like(x),
        lambda x: torch.empty_like(x),
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: F.rrelu(x, training=True),
        lambda x: checkpoint(lambda t: F.dropout(t, 0.5), x, use_reentrant=False),
    ],
)
def test_draws(function):
    graph = captured(function, X)
    assert any(effects_of(node).draws for node in graph.nodes)


def test_running_statistics_are_written():
    """Without a word of it in the operator's schema."""
    mean, variance = torch.zeros(8), torch.ones(8)
    graph = captured(lambda x, m, v: F.batch_norm(x, m, v, training=True), X, mean, variance)
    node = next(n for n in graph.nodes if n.op == "call_function")
    _, m, v = (n for n in graph.nodes if n.op == "placeholder")
    assert effects_of(node).writes == memory_of([m.meta["example_value"], v.meta["example_value"]])


def test_shapes_that_are_changed():
    assert effects_of(last(lambda x: (x * 2.0).t_(), X)).changes_shape


def test_shapes_of_what_an_operator_makes_for_itself():
    node = last(lambda x: F.adaptive_avg_pool1d(x[None], 1), X)
    assert effects_of(node).none


def test_modes_are_not_entered():
    """A node that sets one is not run: afterwards all is as before."""

    def function(x):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            y = x @ x.mT
        return torch.vmap(lambda row: row * 2.0)(y)

    graph = captured(function, X)
    before = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    assert not all(effects_of(node).known for node in graph.nodes)
    assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == before
    assert torch._C._functorch.peek_interpreter_stack() is None


def test_memory():
    def function(x, r):
        y = x + r
        view, part = y.view(-1), y.chunk(2)[1]
        return view, part, y * 2.0, y.contiguous()

    graph = captured(function, X, X)
    memory = Memory(graph)
    view, part, other, same = (memory.of(node) for node in list(graph.nodes)[-1].args[0])
    assert view == part == same and not view & other


def test_what_is_not_known_may_share_memory():
    """A hook's function sees the very tensor."""

    def function(x):
        y = x * 2.0
        y.register_hook(lambda g: g * 3.0)
        return y + 1.0

    graph = captured(function, X.clone().requires_grad_())
    unknown = [node for node in graph.nodes if node.op == "call_function" and not effects_of(node).known]
    memory = Memory(graph)
    for node in unknown:  # with torch 2.11 it gives no tensor
        assert memory.of(node) <= memory.of(node.args[0])
        assert effects_of(node).writes == memory.of(node.args[0])


def test_bodies_are_looked_into():
    def function(x, r):
        def block(t):
            r.add_(1.0)
            return t * 2.0

        return checkpoint(lambda t: t * 2.0, x, use_reentrant=False) + x

    graph = captured(function, X, X)
    (node,) = [node for node in graph.nodes if bodies(node)]
    assert effects_of(node).known and not effects_of(node).writes


def test_only_what_has_no_effect_is_removed():
    def function(x, r):
        unused = torch.exp(x) * 2.0
        r.add_(1.0)
        drawn = torch.rand_like(x)
        return x + 1.0, unused, drawn

    graph = captured(function, X, X.clone())
    output = list(graph.nodes)[-1]
    output.args = ((output.args[0][0],),)
    before = len(graph.nodes)
    remove_unused(graph, list(graph.nodes))
    assert before - len(graph.nodes) == 2  # exp and its product; neither what is written nor what is drawn
    graph.lint()
