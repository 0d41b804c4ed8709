"""A norm whose result goes to one linear layer and nowhere else: one line with the words behind the layer, too."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from onepass._native import LineError
from onepass.line import _parse
from onepass.rewrite.chains import Chain, Order
from onepass.rewrite.operations import operation, sizes, value_of
from onepass.rewrite.rewriter import BIAS

__all__ = ["with_linear_layers"]


def with_linear_layers(graph: fx.Graph, found: list[Chain], device: torch.device, training: bool) -> list[Chain]:
    """Chains that end with a norm, joined with the linear layer behind it and the chain behind that, where a strategy
    of `linear` is predicted to be faster than the library's product between two kernels."""
    order, of_input = Order(graph), {chain.x: chain for chain in found}
    joined, taken = [], set()
    for chain in found:
        longer = _with_linear(chain, of_input) if chain.has_row_word else None
        if longer is not None and order.place(longer) and _is_faster(longer, device, training):
            joined.append(longer)
            taken |= {id(other) for other in found if other.nodes <= longer.nodes}
    return [chain for chain in found if id(chain) not in taken] + joined


def _with_linear(chain: Chain, of_input: dict[fx.Node, Chain]) -> Chain | None:
    users = list(chain.result.users)
    op = operation(users[0]) if len(users) == 1 else None
    if op is None or op.name != "linear" or op.arguments[0] is not chain.result:
        return None
    product, (_, weight, bias) = users[0], op.arguments
    if value_of(weight).dtype != value_of(chain.x).dtype:
        return None
    longer = replace(
        chain,
        words=(*chain.words, "linear", *(("bias",) if bias is not None else ())),
        operands=(*chain.operands, weight, *((bias,) if bias is not None else ())),
        results=(product, *chain.results[1:]),
        nodes=chain.nodes | {product},
    )
    behind = of_input.get(product)
    users = list(product.users)
    if behind is not None and set(users) <= behind.nodes and len(behind.results) == 1:
        whole = _joined(longer, behind.words, behind.operands, behind.result, behind.nodes)
        return whole if _is_line(whole.words) else None
    if len(users) == 1 and BIAS in users[0].meta:
        return _joined(longer, ("bias",), (users[0].args[1],), users[0], frozenset(users))
    return longer


def _joined(chain: Chain, words, operands, result: fx.Node, nodes) -> Chain:
    return replace(
        chain,
        words=chain.words + words,
        operands=chain.operands + operands,
        results=(result, *chain.results[1:]),
        nodes=chain.nodes | nodes,
    )


def _is_line(words: tuple[str, ...]) -> bool:
    try:
        return _parse(" | ".join(words)) is not None
    except LineError:
        return False


def _is_faster(chain: Chain, device: torch.device, training: bool) -> bool:
    line, x = _parse(chain.line), value_of(chain.x)
    if device.type == "cuda" and not torch.cuda.is_available():
        return False
    features = sizes(value_of(chain.operands[line.weight]))[0]
    return line.plan(sizes(x), x.dtype, features, device=device, training=training).strategy != "unfused"
