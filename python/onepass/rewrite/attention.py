"""Attention in a graph: written out as two products with a softmax between them, or as PyTorch's one function."""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onepass import functional
from onepass.functional._engines import Call, call_of, choose
from onepass.graph.effects import UNKNOWN, changes_shapes, effects_of, evaluated, remove_unused
from onepass.graph.operations import APART, called, is_tensor, operation, same, same_shape, value_of
from onepass.rewrite.find.chains import Chain, Order, lies_as
from onepass.rewrite.rewriter import before_moves, moves
from onepass.word import about

__all__ = [
    *("drop_empty_joins", "drop_second_copies", "fold_scales", "put_own_attention", "take_before_copies"),
    "with_products",
]


def with_products(chain: Chain) -> Chain:
    """A chain of softmax with the product of queries and keys that gives its input, and that of its weights and the
    values, where these are what it looks like; else as it is."""
    has_softmax = any("is_softmax" in about(word).properties for word in chain.words)
    if not has_softmax or value_of(chain.x).dim() < 3 or chain.is_viewed or chain.orders:
        return chain
    scored = _with_scores(chain)
    return next((way for way in (_with_values(scored), scored) if way.is_line), chain)


def _with_scores(chain: Chain) -> Chain:
    op = operation(chain.x)
    if op is None or op.name != "matmul" or not set(chain.x.users) <= chain.nodes:
        return chain
    query, other = op.arguments
    swapped = operation(other)
    if swapped is None or swapped.name != "swapped" or about(chain.words[0]).operand == "keys":
        return chain
    key = swapped.arguments[0]
    if (
        not same_shape(value_of(query).shape[:-2], value_of(key).shape[:-2])
        or value_of(query).dtype != value_of(key).dtype
    ):
        return chain
    return replace(
        chain,
        words=("scores", *chain.words),
        x=query,
        operands=(key, *chain.operands),
        met=(None, *chain.met),
        nodes=chain.nodes | {chain.x},
        passes=chain.passes | {other},
    )


def _with_values(chain: Chain) -> Chain:
    if about(chain.words[0]).operand != "keys" or len(chain.results) > 1:
        return chain
    weights, passed = chain.result, set()
    while len(weights.users) == 1 and (op := operation(user := next(iter(weights.users)))) and op.name == "same":
        weights = user  # dropout that is off, say
        passed.add(user)
    products = [u for u in weights.users if (op := operation(u)) and op.name == "matmul" and op.arguments[0] is weights]
    if len(products) != 1:
        return chain
    product, value = products[0], operation(products[0]).arguments[1]
    of_value, of_weights = value_of(value), value_of(weights)
    if (
        not is_tensor(value)
        or not same_shape(of_value.shape[:-2], of_weights.shape[:-2])
        or of_value.dtype != of_weights.dtype
    ):
        return chain
    keeps = len(weights.users) > 1
    return replace(
        chain,
        words=(*chain.words, *(("keep",) if keeps else ()), "values"),
        operands=(*chain.operands, value),
        met=(*chain.met, None),
        results=(product, *((weights,) if keeps else ())),
        nodes=chain.nodes | passed | {product},
    )


def fold_scales(graph: fx.Graph) -> None:
    """Gives PyTorch's attention the number by which a model multiplies its queries before (Whisper, BART), as part of
    its scale: one tensor less is written, and saved."""
    if changes_shapes(graph):
        return
    order = Order(graph)
    for node in list(graph.nodes):
        op = operation(node)
        if op is None or op.name != "attention":
            continue
        query, key, value, mask, p, is_causal, scale, grouped = op.arguments
        if any(other is query for other in (key, value, mask)):
            continue
        scaled, between = before_moves(query)
        if (found := _times_number(scaled)) is None or len(scaled.users) > 1:
            continue
        source, number = found
        features = value_of(query).shape[-1]
        known = scale is None and isinstance(features, int) and features > 0 or isinstance(scale, (int, float))
        if not known or not order.in_one_mode(source, scaled, *between, node) or order.is_given(source):
            continue
        if order.is_written({source}, order.index[source]):
            continue
        number *= features**-0.5 if scale is None else scale
        if order.attends(node, (query, key, value, mask, p, is_causal, number, grouped)):
            (between[-1] if between else node).replace_input_with(scaled, source)
            graph.erase_node(scaled)


def _times_number(node: fx.Node) -> tuple[fx.Node, float] | None:
    """What a node multiplies with a number above 0, and that; if both lie in memory alike."""
    op = operation(node)
    if op is None or op.name != "mul" or effects_of(node).writes:
        return None
    source, number = op.arguments if is_tensor(op.arguments[0]) else reversed(op.arguments)
    if not is_tensor(source) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
        return None
    before, after = value_of(source), value_of(node)
    return (source, number) if before.dtype == after.dtype and lies_as(before, after) else None


def take_before_copies(graph: fx.Graph) -> None:
    """Gives PyTorch's attention what it was given copies of: heads of keys and values that models repeat for each of
    their queries' (it knows groups of heads itself), tensors made contiguous, and a cache that was empty before. An
    engine takes any strides of rows; what reads less saves less for backward, which then adds up nothing."""
    if changes_shapes(graph):
        return
    order, copies = Order(graph), []
    chooses = any("sdpa_kernel" in getattr(node.target, "__name__", "") for node in graph.nodes)
    for node in list(graph.nodes):
        op = operation(node)
        if op is None or op.name != "attention" or not all(map(is_tensor, op.arguments[:3])):
            continue
        copied, rest, grouped = list(op.arguments[:3]), op.arguments[3:7], op.arguments[7]
        taken = [_before_copies(tensor, node, order) for tensor in copied]
        shared = None if grouped or chooses else _before_repeats(*taken, node, order)
        if shared is not None and _may_share(op.arguments, (*shared, *rest, True), order.is_given(node)):
            taken, grouped = [_before_copies(tensor, node, order) for tensor in shared], True
        if taken == copied:
            continue
        if order.attends(node, (*taken, *rest, grouped)):
            copies += copied
    remove_unused(graph, copies)


def _may_share(repeated: tuple, grouped: tuple, is_given: bool) -> bool:
    """Whether groups of heads are computed by who computes heads that were repeated, and as fast: on the CPU ours,
    whose result is a view then, on CUDA one of PyTorch's fast engines. That for float32 and masks has no groups."""
    engines = [_engine(*arguments) for arguments in (repeated, grouped)]
    query, _, value, mask = map(value_of, grouped[:4])
    if not query.is_cuda:
        return engines == ["onepass", "onepass"] and not is_given
    if engines[0] != engines[1] or mask is not None or query.dtype not in SHORT:
        return False
    capability = _call(*grouped).capability
    widest = 256 if capability in FOR_DATA_CENTRES else 128
    fits = query.shape[-1] % 8 == 0 and query.shape[-1] <= widest and same(query.shape[-1], value.shape[-1])
    return fits and capability >= (8, 0) and torch.backends.cuda.flash_sdp_enabled()


SHORT = (torch.bfloat16, torch.float16)
FOR_DATA_CENTRES = ((8, 0), (9, 0), (10, 0))
"""Their flash attention has a backward pass of more than 192 features, too."""


def _before_copies(tensor: fx.Node, user: fx.Node, order: Order) -> fx.Node:
    """The tensor of which another is a copy, or a copy of that; as far as rows stay one number behind the other."""
    while (source := _copied(tensor)) is not None and _is_passed(tensor, source, user, order):
        tensor = source
    return tensor


def _copied(node: fx.Node) -> fx.Node | None:
    """What a node makes contiguous, or joins with tensors that are empty."""
    if node.target not in (torch.cat, torch.concat):
        op = operation(node)
        return op.arguments[0] if op is not None and op.name == "same" else None
    joined = node.args[0] if node.args and not node.meta.get(APART) else None
    if not isinstance(joined, (list, tuple)) or not all(map(is_tensor, joined)):
        return None
    full = [t for t in joined if not same(value_of(t).numel(), 0)]
    if len(full) != 1 or any(value_of(t).requires_grad for t in joined if t is not full[0]):
        return None
    before, after = value_of(full[0]), value_of(node)
    return full[0] if before.dtype == after.dtype and same_shape(before.shape, after.shape) else None


def drop_empty_joins(graph: fx.Graph) -> None:
    """Leaves out `cat` of what attention takes and tensors that are empty, as a cache's first update is written, where
    the graph does not give it: what gives the keys and the cast that autocast has attention make are one line then."""
    if changes_shapes(graph):
        return
    order = Order(graph)
    for node in list(graph.nodes):
        source = _copied(node) if node.target in (torch.cat, torch.concat) else None
        if source is None or not effects_of(node).none or order.is_given(node) or order.is_given(source):
            continue
        path = _way_to_attention(node)
        seen = path is None or any(order.shows_gradient(on_way, frozenset()) for on_way in (node, *path))
        if (
            seen
            or not order.in_one_mode(source, node, *path)
            or value_of(source).requires_grad != value_of(node).requires_grad
        ):
            continue
        if order.is_written({source}, order.index[source]) or order.is_written({node, *path}, order.index[node]):
            continue
        if lies_as(value_of(source), value_of(node)) or order.absorbs({node: value_of(source)}):
            node.replace_all_uses_with(source)
            remove_unused(graph, [node])
            for on_way in path:
                on_way.meta = {**on_way.meta, "example_value": evaluated(on_way)}


def _way_to_attention(node: fx.Node) -> list[fx.Node] | None:
    """What moves or repeats a tensor's numbers until attention alone takes them."""
    path: list[fx.Node] = []
    while True:
        last = path[-1] if path else node
        users = list(last.users)
        if users and all((op := operation(user)) is not None and op.name == "attention" for user in users):
            return path
        if len(users) != 1 or not moves(users[0]) or users[0].args[0] is not last:
            return None
        path += users


def drop_second_copies(graph: fx.Graph) -> None:
    """Leaves out `cat` of a tensor that was just made contiguous and tensors that are empty, as a cache's first update
    is written. Attention cannot take what was before both where the graph gives the cache: the next graph may ask for
    its gradient."""
    if changes_shapes(graph):
        return
    order = Order(graph)
    for node in list(graph.nodes):
        first = _copied(node) if node.target in (torch.cat, torch.concat) else None
        if first is not None and effects_of(node).none and _is_copy_for(first, node, order):
            node.replace_all_uses_with(first)
            remove_unused(graph, [node])


def _is_copy_for(copy: fx.Node, user: fx.Node, order: Order) -> bool:
    """Whether it is new memory, made for one user alone, that could give it as it is."""
    op = operation(copy)
    if op is None or op.name != "same" or list(copy.users) != [user]:
        return False
    memory, value, result = order.memory.of(copy), value_of(copy), value_of(user)
    return (
        UNKNOWN not in memory
        and not memory & order.memory.of(op.arguments[0])
        and not is_traceable_wrapper_subclass(value)
        and lies_as(value, result)
        and value.requires_grad == result.requires_grad
        and order.modes[order.index[copy]] == order.modes[order.index[user]]
    )


def _before_repeats(
    query: fx.Node, key: fx.Node, value: fx.Node, user: fx.Node, order: Order
) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Queries, and the keys and values before their heads were repeated for as many heads of queries."""
    sources = [_repeated(tensor) for tensor in (key, value)]
    if None in sources:
        return None
    for tensor, source in zip((key, value), sources):
        views = tensor.args[0], tensor.args[0].args[0]  # of the source
        shown = any(order.shows_gradient(view, frozenset({*views, tensor})) for view in views)
        if shown or not _is_passed(tensor, source, user, order):
            return None
    heads, (of_key, of_value) = value_of(query).shape[-3], (value_of(source).shape[-3] for source in sources)
    fits = same(of_key, of_value) and isinstance(heads, int) and isinstance(of_key, int) and heads % of_key == 0
    return (query, *sources) if fits and same(heads, value_of(key).shape[-3]) else None


def _repeated(node: fx.Node) -> fx.Node | None:
    """The tensor of which a node has each head several times, one behind the other: x[:, :, None] expanded and viewed,
    as most models spell it."""
    if called(node) not in ("reshape", "view", "flatten") or not is_tensor(expanded := node.args[0]):
        return None
    if called(expanded) not in ("expand", torch.Tensor.expand) or not is_tensor(apart := expanded.args[0]):
        return None
    source = apart.args[0] if _adds_dimension(apart) else None
    if source is None or value_of(source).dim() != 4:  # noqa: PLR2004
        return None
    if any(n.meta.get(APART) for n in (apart, expanded, node)):
        return None
    batch, heads, *row = value_of(source).shape
    times = value_of(expanded).shape[2]
    shapes = (batch, heads, 1, *row), (batch, heads, times, *row), (batch, heads * times, *row)
    fits = all(same_shape(value_of(n).shape, shape) for n, shape in zip((apart, expanded, node), shapes))
    return source if fits else None


def _adds_dimension(node: fx.Node) -> bool:
    """Whether it is x[:, :, None], or the same spelt otherwise."""
    if not node.args or not is_tensor(node.args[0]):
        return False
    if called(node) in ("unsqueeze", torch.unsqueeze):
        return node.args[1:] in ((2,), (-3,))
    every = slice(None)
    index = node.args[1] if node.target is operator.getitem else None
    return isinstance(index, tuple) and index[:3] == (every, every, None) and all(i == every for i in index[3:])


def _is_passed(copy: fx.Node, source: fx.Node, user: fx.Node, order: Order) -> bool:
    """Whether a call may take what a copy of it was made of: rows lie one number behind the other, nobody writes to it
    or is given it, and nobody asks for the copy's gradient."""
    return (
        same(value_of(source).stride(-1), 1)
        and not (value_of(source).requires_grad and order.is_given(source))
        and not order.is_written({source}, order.index[source])
        and not order.is_written({copy}, order.index[copy])
        and not order.shows_gradient(copy, frozenset({user}))
    )


def put_own_attention(graph: fx.Graph) -> list[fx.Node]:
    """Calls of PyTorch's attention that this package's measurements give to its own kernels, now of these. A call whose
    tensors are overwritten behind it stays PyTorch's: which of them backward reads is not the same."""
    changed, order = [], Order(graph)
    for node in graph.nodes:
        op = operation(node)
        if op is None or op.name != "attention" or not _is_own(op.arguments):
            continue
        if op.arguments[7] and order.is_given(node):
            continue  # a view, of groups of heads
        if value_of(node).requires_grad and order.is_written({node, *node.all_input_nodes}, order.index[node]):
            continue
        if order.replaces(node, functional.scaled_dot_product_attention, node.args, node.kwargs):
            changed.append(node)
    return changed


def _is_own(arguments) -> bool:
    return _engine(*arguments) == "onepass"


def _engine(query, key, value, mask, p, is_causal, scale, grouped) -> str:
    """Who computes a call; PyTorch, where sizes change from call to call."""
    tensors = [value_of(t) for t in (query, key, value)]
    if not all(isinstance(t, torch.Tensor) for t in tensors) or any(
        isinstance(size, torch.SymInt) for t in tensors for size in t.shape
    ):
        return "torch"
    return choose(_call(query, key, value, mask, p, is_causal, scale, grouped))


def _call(query, key, value, mask, p, is_causal, scale, grouped) -> Call:
    return call_of(*map(value_of, (query, key, value, mask)), bool(is_causal), p, bool(grouped))
