"""Attention in a graph: written out as two products with a softmax between them, or as PyTorch's one function."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from onepass import functional
from onepass.functional._engines import call_of, choose
from onepass.graph.effects import evaluated
from onepass.graph.operations import is_tensor, operation, same_shape, value_of
from onepass.rewrite.find.chains import Chain, Order, lies_as
from onepass.word import about

__all__ = ["put_own_attention", "with_products"]


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


def put_own_attention(graph: fx.Graph) -> list[fx.Node]:
    """Calls of PyTorch's attention that this package's measurements give to its own kernels, now of these. A call whose
    tensors are overwritten behind it stays PyTorch's: which of them backward reads is not the same."""
    changed, order = [], Order(graph)
    for node in graph.nodes:
        op = operation(node)
        if op is None or op.name != "attention" or not _is_own(op.arguments):
            continue
        if value_of(node).requires_grad and order.is_written({node, *node.all_input_nodes}, order.index[node]):
            continue
        before, node.target = node.target, functional.scaled_dot_product_attention
        given = evaluated(node)
        if lies_as(given, value_of(node)) or order.absorbs({node: given}):
            changed.append(node)
        else:
            node.target = before
    return changed


def _is_own(arguments) -> bool:
    query, key, value, mask, p, is_causal, _, grouped = arguments
    tensors = [value_of(t) for t in (query, key, value)]
    if not all(isinstance(t, torch.Tensor) for t in tensors) or any(
        isinstance(size, torch.SymInt) for t in tensors for size in t.shape
    ):
        return False
    return choose(call_of(*tensors, value_of(mask), bool(is_causal), p, bool(grouped))) == "onepass"
