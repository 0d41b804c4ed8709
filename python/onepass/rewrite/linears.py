"""Linear layers in a graph whose gradients take fewer kernels together: of one input, and of a bias. What they take is
made again in backward where a line has made it of what that line holds."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from onepass._arguments.shapes import is_sharded
from onepass.autograd import differentiable, is_transformed
from onepass.call import fused, runs_on_cpu
from onepass.graph.operations import is_contiguous, is_tensor, operation, value_of
from onepass.line import _parse
from onepass.rewrite.find.chains import Order
from onepass.rewrite.linear import has_bytes, is_large
from onepass.rewrite.rewriter import is_bias, item

__all__ = ["join_linears", "linears"]


def linears(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    line: str = "",
    given: tuple[Tensor, ...] = (),
) -> tuple[Tensor, ...]:
    """`torch.nn.functional.linear(x, weight, bias)` of each weight. In backward the gradients of x are added up in the
    products that give them, and that of a bias is a sum over rows by a kernel of ours. Where a line has made x of what
    is given, and holds that, x is not held: backward makes it again."""
    if not (torch.compiler.is_dynamo_compiling() or is_transformed()) and differentiable() is not None:
        if line and (is_sharded(x) or x.is_cpu and not runs_on_cpu(_parse(line), given[0].dtype, given[1:])):
            line, given = "", ()
        return tuple(torch.ops.onepass.linears.default(x, weights, biases, line, given))
    return tuple(torch.nn.functional.linear(x, weight, bias) for weight, bias in zip(weights, biases))


def join_linears(graph: fx.Graph, nested: bool = False) -> None:
    """Makes one call of linear layers that take one tensor and follow each other, as query, key and value do; and such
    a call of each with a bias. Others may be far apart, as all that take an encoder's result: their gradients would
    have to be there at once. `nested`: in a checkpointed block, which runs again as a whole."""
    order = Order(graph)
    alike: list[fx.Node] = []
    for node in list(graph.nodes):
        op = operation(node)
        if op is None or op.name not in PRODUCTS:
            continue
        is_layer = _is_layer(node)
        if not (is_layer and alike and _follows(node, alike, order)):
            _join(order, alike, nested)
            alike = []
        alike += [node] if is_layer else []
    _join(order, alike, nested)


def _has_long_sum(node: fx.Node) -> bool:
    """Whether the sum that its bias is given takes longer than what calls it."""
    bias, value = operation(node).arguments[2], value_of(node)
    return bias is not None and value_of(bias).requires_grad and has_bytes(value, LONG_SUM)


PRODUCTS = ("linear", "addmm", "matmul", "attention")
MOST = 63
LONG_SUM = 1 << 24
"""Bytes of a gradient. Below, what calls cost the host weighs more; it has not been measured where they are equal."""


def _is_layer(node: fx.Node) -> bool:
    """Whether its weight has a gradient, or what it takes, and it has no bias but a column."""
    op = operation(node)
    if op is None or op.name != "linear":
        return False
    x, weight, bias = op.arguments
    if not (is_tensor(x) and is_tensor(weight)) or value_of(weight).dim() != 2:  # noqa: PLR2004
        return False
    lies = is_contiguous(value_of(x)) and is_contiguous(value_of(weight))  # as gradients then do
    value = value_of(node)
    return lies and value.requires_grad and value.is_floating_point() and (bias is None or is_bias(bias, node))


def _follows(node: fx.Node, alike: list[fx.Node], order: Order) -> bool:
    """Whether it may be computed where the first of these is."""
    first, begin = alike[0], order.index[alike[0]]
    x, weight, bias = operation(node).arguments
    taken = {x, weight, *(() if bias is None else (bias,))}
    return (
        x is operation(first).arguments[0]
        and len(alike) < MOST
        and order.modes[order.index[node]] == order.modes[begin]
        and all(order.index[other] < begin for other in taken)
        and not order.is_written(taken, begin)
    )


def _join(order: Order, alike: list[fx.Node], nested: bool) -> None:
    layers = [operation(node).arguments for node in alike]
    if not layers or len(layers) == 1 and not _has_long_sum(alike[0]):
        return
    x, weights, biases = layers[0][0], *zip(*((weight, bias) for _, weight, bias in layers))
    graph = order.graph
    is_held = not nested and set(x.users) <= {*alike} and value_of(x).requires_grad and is_large(value_of(x))
    made_by = made_of(x) if is_held else ()
    with graph.inserting_before(alike[0]):
        call = graph.call_function(linears, (x, weights, biases, *made_by))
        call.meta = {"example_value": tuple(value_of(node) for node in alike)}
        for i, node in enumerate(alike):
            result = graph.call_function(operator.getitem, (call, i))
            result.meta, order.index[result] = dict(node.meta), order.index[alike[0]]
            node.replace_all_uses_with(result)
    for node in alike:
        graph.erase_node(node)


def made_of(node: fx.Node) -> tuple[str, tuple[fx.Node, ...]] | tuple[()]:
    """A line that makes a tensor again of what the line that has made it holds for backward, and what this takes;
    nothing where there is none. What it makes may be of float32, of which the tensor is a cast."""
    op = operation(node)
    source = op.arguments[0] if op is not None and op.name == "cast" else node
    if source is not node and value_of(source).dtype != torch.float32:
        return ()  # float32 of what the line has rounded, or kept wider
    call, index = (source.args[0], source.args[1]) if source.target is item else (source, 0)
    if call.target is not fused or index != 0 or call.kwargs:
        return ()
    text, *taken = call.args
    line = _parse(text)
    if line.has_dropout or line.weight is not None or line.scores or line.group or any(line.numbers):
        return ()
    words = [str(word) for word in line.words]
    behind = max((i + 1 for i, word in enumerate(line.words) if word.kind == "keep"), default=0)
    if behind and line.resumes_from != line.keeps or not behind and not line.reads_x:
        return ()  # what the last words begin with is not held
    own = [i for i, keeps in enumerate(line.keeps_before) if not behind or keeps == line.keeps]
    if not words[behind:] or any(i in line.tensor_operands and not line.reads_operands[i] for i in own):
        return ()
    first = _kept(call, line.keeps, source) if behind else taken[0]
    return " | ".join(words[behind:]), (first, *(taken[1 + i] for i in own))


def _kept(call: fx.Node, index: int, like: fx.Node) -> fx.Node:
    """A value that a line keeps, which others may need as well."""
    for user in call.users:
        if user.target is item and user.args[1] == index:
            return user
    with call.graph.inserting_after(call):
        made = call.graph.call_function(item, (call, index))
    made.meta = {"example_value": value_of(like)}
    return made
