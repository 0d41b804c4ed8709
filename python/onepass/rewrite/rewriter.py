"""Puts lines in the place of what they are the same as, in a captured graph."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import Tensor, fx

from onepass._operators.fake import empty_in_order
from onepass.call import fused
from onepass.graph.effects import detached, evaluated, remove_unused
from onepass.graph.operations import is_tensor, operation, same_shape, value_of
from onepass.line import _parse
from onepass.rewrite.find.chains import Chain, Order, inverse, is_column, lies_as, permuted
from onepass.word import about

__all__ = [
    *("CASTS", "as_result", "before_moves", "is_bias", "item", "moves", "put_lines", "rejoin_biases"),
    *("remove_casts", "separate_biases", "separate_casts"),
]

BIAS = "onepass_bias"
"""Says of a sum that it is the bias of the product before it: PyTorch adds it in the product's kernel."""


def separate_biases(graph: fx.Graph) -> None:
    """Makes the bias of a linear layer a sum of its own, so that a line can begin with it."""
    for node in list(graph.nodes):
        op = operation(node)
        if op is None or op.name not in ("linear", "addmm") or not is_bias(op.arguments[2], node):
            continue
        x, weight, bias = op.arguments
        with graph.inserting_before(node):
            if op.name == "linear":
                product = graph.call_function(torch._C._nn.linear, (x, weight))
            else:
                product = graph.call_function(torch.mm, (x, weight))
            total = graph.call_function(torch.add, (product, bias))
        product.meta, total.meta = dict(node.meta), {**node.meta, BIAS: True}
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def remove_casts(graph: fx.Graph) -> None:
    """Puts a tensor in the place of its casts to the dtype and device that it has, which give the tensor itself."""
    for node in list(graph.nodes):
        if node.op != "call_method" or node.target not in CASTS or node.kwargs.get("copy") or not is_tensor(node):
            continue
        source, kwargs = node.args[0], {*node.kwargs} - {"dtype", "device", "non_blocking"}
        if len(node.args) > 2 or kwargs or not is_tensor(source):  # noqa: PLR2004
            continue
        value, before = value_of(node), value_of(source)
        if (value.dtype, value.device) == (before.dtype, before.device):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


CASTS = ("float", "double", "half", "bfloat16", "to", "type", "type_as")


def separate_casts(graph: fx.Graph) -> None:
    """Under autocast, makes the cast of what a product takes an operation of its own: one for all the products that
    take the same tensor, one with which a line can end, and one that stands before what only moves or repeats the
    tensor. Parameters autocast itself casts once."""
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    order = Order(graph)
    for node in list(graph.nodes):
        op = operation(node)
        if op is None or op.name not in PRODUCTS or value_of(node).dtype not in (torch.bfloat16, torch.float16):
            continue
        dtype = value_of(node).dtype
        for taken in [a for a in op.arguments[:3] if is_tensor(a) and a.op not in ("placeholder", "get_attr")]:
            if value_of(taken).dtype != torch.float32:
                continue
            source, between = before_moves(taken)
            if order.is_written({source}, order.index[source]):
                continue
            if (source, dtype) not in casts:
                value = detached(value_of(source)).to(dtype)
                cast = _behind(graph, source, value, "call_method", "to", (source, dtype))
                casts[source, dtype] = cast
            (between[-1] if between else node).replace_input_with(source, casts[source, dtype])
            for moved in reversed(between):
                moved.meta = {**moved.meta, "example_value": evaluated(moved)}


def before_moves(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The tensor whose numbers a node has in another order, or more than once, and the nodes between, the last one
    first; as far as nobody else sees them."""
    found: list[fx.Node] = []
    while moves(node) and len(node.users) == 1:
        found.append(node)
        node = node.args[0]
    return node, found


def moves(node: fx.Node) -> bool:
    """Whether all of a tensor's numbers are in the node's result; x[:, :, None] is one of the spellings."""
    if node.target is operator.getitem:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return is_tensor(node.args[0]) and all(at in (None, Ellipsis, slice(None)) for at in index)
    return node.op == "call_method" and node.target in MOVES


MOVES = ("expand", "reshape", "view", "transpose", "permute", "contiguous", "unsqueeze", "flatten")
PRODUCTS = ("linear", "addmm", "matmul", "attention")


def rejoin_biases(graph: fx.Graph) -> None:
    """Where no line begins with it, as it was."""
    for node in list(graph.nodes):
        if BIAS not in node.meta:
            continue
        product, bias = node.args
        if product.target is fused:
            continue
        with graph.inserting_before(node):
            if product.target is torch.mm:
                joined = graph.call_function(torch.addmm, (bias, *product.args))
            else:
                joined = graph.call_function(product.target, (*product.args, bias))
        joined.meta = {key: value for key, value in node.meta.items() if key != BIAS}
        node.replace_all_uses_with(joined)
        graph.erase_node(node)
        graph.erase_node(product)


def is_bias(bias: object, product: fx.Node) -> bool:
    return is_tensor(bias) and is_column(value_of(bias), value_of(product).shape)


def put_lines(graph: fx.Graph, found: list[Chain]) -> None:
    """Calls of lines in the place of chains that have no node in common."""
    order, instead = Order(graph), {}
    for chain in found:
        inputs = [instead.get(node, node) for node in chain.inputs]
        order.look()
        _put(order, _as_stored(replace(chain, x=inputs[0], operands=tuple(inputs[1:])), order), instead)
        remove_unused(graph, [*inputs, *chain.passes])


def _as_stored(chain: Chain, order: Order) -> Chain:
    """With columns as they are stored, in x's dtype, where float32 is made of them for this chain alone: a line
    computes in that in any case."""

    def stored(node: fx.Node, kind: str) -> fx.Node:
        op, value = operation(node), value_of(node)
        if kind != "column" or op is None or op.name != "cast" or value.dtype != torch.float32 or value.dim() != 1:
            return node
        source = op.arguments[0]
        is_same = value_of(source).dtype == value_of(chain.x).dtype != torch.float64 and set(node.users) <= chain.nodes
        return source if is_same and not order.is_written({source}, order.index[source]) else node

    return replace(chain, operands=tuple(map(stored, chain.operands, chain.kinds)))


def _put(order: Order, chain: Chain, instead: dict[fx.Node, fx.Node]) -> None:
    """Values that pass through a view on the way are viewed before and after the line, and those whose rows lie along
    another dimension are turned."""
    graph, turned = order.graph, order.layout(chain)
    as_it_is = tuple(range(len(turned)))
    attended, is_seen_to_lie = _attended(order, chain)
    with graph.inserting_after(order.place(chain)):
        call = graph.call_function(fused, (chain.line,))  # what it takes goes before it, what it gives behind it
    with graph.inserting_before(call):
        inputs = _viewed(graph, chain) if chain.is_viewed else chain.inputs
        if turned != as_it_is or chain.orders:
            inputs = _turned(order, chain, turned)
    call.args = (chain.line, *inputs)
    values = [detached(value_of(node)) for node in chain.results]
    leading = values[0].shape[:-1]
    given = [value.reshape(*leading, value.shape[-1]).permute(turned) for value in values]
    if attended is not None:
        given[0] = attended
    one, keeps_before = not chain.has("keep"), _parse(chain.line).keeps_before
    call.meta = {"example_value": given[0] if one else tuple(given)}
    back = inverse(turned)
    after = call
    for i, (node, value) in enumerate(zip(chain.results, values)):
        if i > 0 and set(node.users) <= chain.nodes:
            continue  # kept for backward alone
        result = call
        if not one:
            result = after = _behind(graph, after, given[i], "call_function", item, (call, i))
            if given[0].requires_grad and not given[i].requires_grad:  # what is behind it makes the line's results so
                before = [n for n, keeps in zip(call.args[2:], keeps_before) if keeps < i]
                taken = (result, (call.args[1], *before))
                result = after = _behind(graph, after, given[i], "call_function", _needs_what_it_takes, taken)
        if i == 0 and is_seen_to_lie:
            result = after = _behind(graph, after, value, "call_method", "contiguous", (result,))
        moves, shape = turned != as_it_is, tuple(value.shape)
        if same_shape(value.shape[:-1], leading):
            shape = None
        is_seen = moves or shape is not None
        if is_seen and not value_of(node)._is_view() and order.is_given(node):
            result = after = _behind(graph, after, value, "call_function", as_result, (result, back, shape))
        else:
            if moves:
                result = after = _behind(graph, after, value, "call_method", "permute", (result, back))
            if shape is not None:
                result = after = _behind(graph, after, value, "call_method", "view", (result, shape))
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in chain.nodes)
        instead[node] = result
    for node in sorted(chain.nodes, key=order.index.get, reverse=True):
        if not node.users:
            graph.erase_node(node)


def _attended(order: Order, chain: Chain) -> tuple[Tensor | None, bool]:
    """What a line with `values` gives, as it lies in memory, which products of matrices do not ask for; and whether
    somebody can see that."""
    if all(about(word).operand != "values" for word in chain.words):
        return None, False
    before = value_of(chain.result)
    attended = detached(empty_in_order(value_of(chain.x), before.shape[-1], before))
    attended.requires_grad_(before.requires_grad)
    is_seen = not lies_as(attended, before) and not order.absorbs({chain.result: attended}, chain.nodes)
    return attended, is_seen


def _behind(graph: fx.Graph, node: fx.Node, value: Tensor, kind: str, target, arguments) -> fx.Node:
    with graph.inserting_after(node):
        made = graph.create_node(kind, target, arguments)
    made.meta = {"example_value": value}
    return made


def _viewed(graph: fx.Graph, chain: Chain) -> list[fx.Node]:
    """What the chain takes, with rows counted as in its result; columns and matrices as they are."""
    leading = value_of(chain.result).shape[:-1]
    inputs = []
    for node, met in zip(chain.inputs, (value_of(chain.x).shape, *chain.met)):
        value = value_of(node)
        as_it_is = met is None or inputs and is_column(value, met) or same_shape(value.shape[:-1], leading)
        inputs.append(node if as_it_is else _new(graph, "reshape", node, (*leading, value.shape[-1])))
    return inputs


def _turned(order: Order, chain: Chain, turned: tuple[int, ...]) -> list[fx.Node]:
    """What the chain takes, with the result's dimensions in this order; columns as they are."""
    graph, inputs, as_it_is = order.graph, [], tuple(range(len(turned)))
    for node, kind, own in zip(chain.inputs, ("tensor", *chain.kinds), chain.orders or ((),) * len(chain.inputs)):
        value, to = value_of(node), permuted(own, turned)
        if (kind != "column" or value.dim() > 1) and to != as_it_is:
            for _ in range(len(turned) - value.dim()):
                node = _new(graph, "unsqueeze", node, 0)
            while (op := operation(node)) is not None and op.name == "permuted":  # a model turns heads, and we back
                if order.shows_gradient(node, chain.nodes):
                    break
                node, to = op.arguments[0], permuted(op.arguments[1], to)
            node = node if to == as_it_is else _new(graph, "permute", node, to)
        inputs.append(node)
    return inputs


def _new(graph: fx.Graph, method: str, node: fx.Node, *arguments) -> fx.Node:
    made = graph.call_method(method, (node, *arguments))
    made.meta = {"example_value": evaluated(made)}
    return made


def as_result(result: Tensor, order: tuple[int, ...], shape: tuple | None) -> Tensor:
    """A view of what a line gives that is none for autograd: where a graph gives it, `detach_` takes it, and what
    views it is overwritten with it, as of what an operator gives. They share the version, which backward looks at."""
    if torch.is_grad_enabled() and result.requires_grad:
        return _AsResult.apply(result, order, shape)
    return _seen(result, order, shape).detach()


def _seen(result: Tensor, order: tuple[int, ...], shape: tuple | None) -> Tensor:
    turned = result.permute(order)
    return turned if shape is None else turned.view(shape)


class _AsResult(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(result, order, shape):
        return _seen(result, order, shape).detach()

    @staticmethod
    def setup_context(ctx, inputs, output):
        result, ctx.order, ctx.shape = inputs
        ctx.turned = [result.shape[d] for d in ctx.order]

    @staticmethod
    def backward(ctx, gradient):
        return gradient.reshape(ctx.turned).permute(inverse(ctx.order)), None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _seen(tangent, ctx.order, ctx.shape)


def item(results: tuple[Tensor, ...], index: int) -> Tensor:
    """Of a line that has several."""
    return results[index]


def _needs_what_it_takes(kept: Tensor, taken: tuple[Tensor, ...]) -> Tensor:
    """A kept value, that needs a gradient only where what it is computed from does."""
    return kept if any(tensor.requires_grad for tensor in taken) else kept.detach()
