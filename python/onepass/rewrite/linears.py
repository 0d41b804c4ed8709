"""Linear layers in a graph whose gradients take fewer kernels together: of one input, and of a bias."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from onepass.autograd import differentiable, is_transformed
from onepass.graph.operations import is_contiguous, is_tensor, operation, value_of
from onepass.rewrite.find.chains import Order
from onepass.rewrite.rewriter import is_bias

__all__ = ["join_linears", "linears"]


def linears(x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """`torch.nn.functional.linear(x, weight, bias)` of each weight. In backward the gradients of x are added up in the
    products that give them, and that of a bias is a sum over rows by a kernel of ours."""
    if not (torch.compiler.is_dynamo_compiling() or is_transformed()) and differentiable() is not None:
        return tuple(torch.ops.onepass.linears.default(x, weights, biases))
    return tuple(torch.nn.functional.linear(x, weight, bias) for weight, bias in zip(weights, biases))


def join_linears(graph: fx.Graph) -> None:
    """Makes one call of linear layers that take one tensor and follow each other, as query, key and value do; and such
    a call of each with a bias. Others may be far apart, as all that take an encoder's result: their gradients would
    have to be there at once."""
    order = Order(graph)
    alike: list[fx.Node] = []
    for node in list(graph.nodes):
        op = operation(node)
        if op is None or op.name not in PRODUCTS:
            continue
        is_layer = _is_layer(node)
        if not (is_layer and alike and _follows(node, alike, order)):
            _join(order, alike)
            alike = []
        alike += [node] if is_layer else []
    _join(order, alike)


def _has_long_sum(node: fx.Node) -> bool:
    """Whether the sum that its bias is given takes longer than what calls it."""
    bias, value = operation(node).arguments[2], value_of(node)
    if bias is None or not value_of(bias).requires_grad or any(isinstance(size, torch.SymInt) for size in value.shape):
        return False
    return value.numel() * value.element_size() >= LONG_SUM


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


def _join(order: Order, alike: list[fx.Node]) -> None:
    layers = [operation(node).arguments for node in alike]
    if not layers or len(layers) == 1 and not _has_long_sum(alike[0]):
        return
    x, weights, biases = layers[0][0], *zip(*((weight, bias) for _, weight, bias in layers))
    graph = order.graph
    with graph.inserting_before(alike[0]):
        call = graph.call_function(linears, (x, weights, biases))
        call.meta = {"example_value": tuple(value_of(node) for node in alike)}
        for i, node in enumerate(alike):
            result = graph.call_function(operator.getitem, (call, i))
            result.meta, order.index[result] = dict(node.meta), order.index[alike[0]]
            node.replace_all_uses_with(result)
    for node in alike:
        graph.erase_node(node)
