"""Linear layers as parts of lines: behind a norm that gives to them alone, with what stands behind them, and behind
what they would else hold for backward."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from onepass.graph.effects import detached
from onepass.graph.operations import is_contiguous, operation, same_shape, sizes, value_of
from onepass.line import Line, _parse
from onepass.pricing.profile import Profile
from onepass.rewrite import prices
from onepass.rewrite.find.chains import Chain, Order
from onepass.rewrite.rewriter import BIAS, is_bias

__all__ = ["begins_in_cache", "has_bytes", "is_large", "name_linear", "with_less_held", "with_linear_layers"]


def name_linear(graph: fx.Graph) -> None:
    """Makes sums of a bias and a product with a parameter, as GPT-2's layers are written, calls of PyTorch's function
    for linear layers, of as many dimensions as the tensor has that is viewed as a matrix for them."""
    for node in list(graph.nodes):
        op = operation(node)
        if op is None or op.name != "addmm" or node.kwargs or not is_bias(op.arguments[2], node):
            continue
        x, weight, bias = op.arguments
        source = _viewed_back(node, x)
        with graph.inserting_before(node):
            turned = graph.call_method("t", (weight,))
            turned.meta = {"example_value": detached(value_of(weight)).t()}
            layer = graph.call_function(torch._C._nn.linear, (x if source is None else source, turned, bias))
        replaced = [node] if source is None else list(node.users)
        layer.meta = dict(replaced[0].meta)
        for other in replaced:
            other.replace_all_uses_with(layer)
            graph.erase_node(other)
        if source is not None:
            graph.erase_node(node)


def _viewed_back(product: fx.Node, x: fx.Node) -> fx.Node | None:
    """The tensor that x is a view of, if all users of the product view its rows as that one's."""
    op = operation(x)
    if op is None or op.name != "view":
        return None
    source = op.arguments[0]
    shape = (*value_of(source).shape[:-1], value_of(product).shape[-1])
    views = [user for user in product.users if (of := operation(user)) and of.name == "view"]
    as_source = len(views) == len(product.users) and all(same_shape(value_of(view).shape, shape) for view in views)
    return source if views and as_source else None


def begins_in_cache(chain: Chain, profile: Profile, training: bool) -> bool:
    """Whether what the chain begins with is the result of a linear layer that a line computes in panels, of which
    nobody else has need: then it never leaves a core's cache."""
    layer = _layer(chain.x)
    if layer is None or chain.orders or not set(chain.x.users) <= chain.nodes or not _joined(layer, chain).is_line:
        return False
    return prices.has_own_product(layer, profile, training)


def with_linear_layers(
    graph: fx.Graph, found: list[Chain], device: torch.device, profile: Profile, training: bool
) -> list[Chain]:
    """Chains that end with a norm, joined with the linear layer behind it and the chain behind that, where a strategy
    of `linear` is predicted to be faster than the library's product between two kernels. On the CPU other layers, too,
    with the chain behind them; not in training, where backward takes the library's products. Chains that permute rows
    stay apart: the product would have to."""
    order, of_input = Order(graph), {chain.x: chain for chain in found if not chain.orders}
    joined, taken = [], set()

    def take(longer: Chain) -> None:
        joined.append(longer)
        taken.update(id(other) for other in found if other.nodes <= longer.nodes)

    for chain in found:
        longer = _with_linear(chain, of_input) if chain.has("row") and not chain.orders else None
        if longer is not None and order.place(longer) and is_faster(longer, device, profile, training):
            take(longer)
    claimed = {node for chain in joined for node in chain.nodes}
    for node in graph.nodes:
        layer = None if node in claimed else _layer(node)
        if layer is not None and prices.has_own_product(layer, profile, training):
            ways = [way for way in (_with_behind(layer, of_input), layer) if way is not None]
            ways = [way for way in ways if order.place(way) and _gains(way, profile, training)]
            if ways:
                take(ways[0])
    return [chain for chain in found if id(chain) not in taken] + joined


def with_less_held(graph: fx.Graph, found: list[Chain]) -> list[Chain]:
    """For training: chains joined with the one linear layer that would hold their result for the gradient of its
    weight. Backward of the line makes that result again beside the gradients, from what it reads in any case: one
    tensor less is held for a write more. Of several layers that take a result `linears.made_of` says the same."""
    order = Order(graph)
    claimed = {node for chain in found for node in chain.nodes}
    joined = ((chain, _with_its_holder(chain, claimed)) for chain in found)
    return [longer if longer is not None and order.place(longer) is not None else chain for chain, longer in joined]


def _with_its_holder(chain: Chain, claimed: set[fx.Node]) -> Chain | None:
    """A chain with the linear layer that holds its result, and the bias of that, if they are not claimed by others."""
    value, users = value_of(chain.result), list(chain.result.users)
    layer = _layer(users[0], casts=True) if len(users) == 1 else None
    if layer is None or layer.x is not chain.result or layer.result in claimed:
        return None
    if chain.orders or chain.has("contraction", "ending") or not value.requires_grad or not is_large(value):
        return None
    weight = value_of(layer.operands[0])
    if not weight.requires_grad or not is_contiguous(weight):  # as its gradient then is
        return None
    if weight.dtype != value.dtype and len(layer.operands[0].users) > 1:
        return None  # autocast casts it once for all of them, and a line for itself
    joined = _joined(chain, replace(layer, words=(prices.PYTORCHS, *layer.words[1:])))
    if not joined.is_line or not _reads_no_more(_parse(joined.line), _parse(chain.line)):
        return None
    return joined if claimed & {*joined.result.users} else _with_bias(joined)


def is_large(value: torch.Tensor) -> bool:
    """Whether not to hold it is worth that backward makes it again."""
    return has_bytes(value, LARGE)


def has_bytes(value: torch.Tensor, least: int) -> bool:
    """Whether a tensor's size is known and so large."""
    return not any(isinstance(size, torch.SymInt) for size in value.shape) and value.nbytes >= least


LARGE = 1 << 22
"""Bytes. A smaller tensor is not missed, and models of such wait for the host."""


def _reads_no_more(joined: Line, line: Line) -> bool:
    """Whether the joined line's backward reads nothing that the line's own does not, but for columns, which are small:
    a value that both keep, or x, and the same operands."""
    if joined.resumes_from != line.resumes_from or joined.reads_x > line.reads_x:
        return False
    return all(not joined.reads_operands[i] or line.reads_operands[i] for i in line.tensor_operands)


def _gains(chain: Chain, profile: Profile, training: bool) -> bool:
    return prices.is_worth_it(*prices.decision(chain, profile, training))


def _layer(node: fx.Node, casts: bool = False) -> Chain | None:
    """A linear layer as a line of its own. casts: also one whose weight autocast casts, as it does a line's."""
    op = operation(node)
    if op is None or op.name != "linear":
        return None
    x, weight, bias = op.arguments
    dtypes = {value_of(t).dtype for t in ((x, node) if casts else (x, weight, node))}
    if len(dtypes) > 1 or value_of(x).dim() < 2 or value_of(weight).dim() != 2:
        return None
    if bias is not None and not is_bias(bias, node):
        return None
    words, operands, met = ("linear",), (weight,), (None,)
    if bias is not None:
        words, operands, met = ("linear", "bias"), (weight, bias), (None, value_of(node).shape)
    return Chain(words, x, operands, (node,), frozenset({node}), met)


def _with_linear(chain: Chain, of_input: dict[fx.Node, Chain]) -> Chain | None:
    users = list(chain.result.users)
    layer = _layer(users[0]) if len(users) == 1 else None
    if layer is None or layer.x is not chain.result:
        return None
    joined = _joined(chain, layer)
    return _with_behind(joined, of_input) if joined.is_line else None


def _with_behind(chain: Chain, of_input: dict[fx.Node, Chain]) -> Chain | None:
    """A chain that ends with a linear layer, with the chain that begins with its result; as it is where there is none,
    None where the two are no line."""
    product = chain.result
    behind, users = of_input.get(product), list(product.users)
    if behind is not None and set(users) <= behind.nodes and len(behind.results) == 1:
        whole = _joined(chain, behind)
        return whole if whole.is_line else None
    return _with_bias(chain)


def _with_bias(chain: Chain) -> Chain:
    """A chain that ends with a linear layer, with the bias that was separated from it; as it is where there is none."""
    product, users = chain.result, list(chain.result.users)
    if len(users) != 1 or BIAS not in users[0].meta:
        return chain
    bias, shape = users[0], value_of(users[0]).shape
    return _joined(chain, Chain(("bias",), product, (bias.args[1],), (bias,), frozenset({bias}), (shape,)))


def _joined(chain: Chain, behind: Chain) -> Chain:
    nodes = chain.nodes | behind.nodes
    return replace(
        chain,
        words=chain.words + behind.words,
        operands=chain.operands + behind.operands,
        results=(behind.result, *chain.results[1:]),
        nodes=nodes,
        met=chain.met + behind.met,
        passes=(chain.passes | behind.passes) - nodes,
    )


def is_faster(chain: Chain, device: torch.device, profile: Profile, training: bool) -> bool:
    """Whether a line with a norm before `linear` is faster than lines beside the library's product. On a GPU the times
    of the strategies say it; on the CPU these are not known, and what the whole line is predicted to save says it."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return False
    line, x = _parse(chain.line), value_of(chain.x)
    features = sizes(value_of(chain.operands[line.weight]))[0]
    if line.plan(sizes(x), x.dtype, features, device=device, training=training).strategy == "unfused":
        return False
    return device.type == "cuda" or _gains(chain, profile, training)
