"""The nodes of a captured graph with their prices, and those of the graphs within it: what checkpoint, cond, scan or an
autograd function hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils.flop_counter import sdpa_flop_count

from onepass.graph.operations import results_of
from onepass.pricing import prices
from onepass.pricing.counting import Counts
from onepass.pricing.kernels import kernel_with
from onepass.pricing.nodes import bytes_in, counts_of, given_to, trains
from onepass.pricing.prices import Price
from onepass.pricing.profile import Profile

__all__ = ["Part", "checkpointed", "parts"]


@dataclass(frozen=True)
class Part:
    """A node that moves data.

    Attributes:
        within: in which other node's graph it is, and how its price is meant: "" where it is in the captured one.
        unknown: what it calls of which only the bytes are known.
    """

    node: fx.Node
    forward: Price
    backward: Price
    within: str = ""
    unknown: tuple[str, ...] = ()


def parts(gm: fx.GraphModule, profile: Profile, training: bool) -> Iterator[Part]:
    """All nodes of a graph that move data, once each: where one has graphs of its own, these graphs' in its place."""
    for node in gm.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            yield from _of_higher_order(node, gm, profile, training)
        elif node.target is torch.autograd.grad or getattr(node.target, "__name__", "") == "_autograd_grad":
            yield from _of_gradients(node, profile)
        else:
            forward = prices.of_node(node, profile)
            backward = prices.of_node(node, profile, backward=True) if training else Price()
            if forward.bytes or backward.bytes:
                yield Part(node, forward, backward, unknown=tuple(dict.fromkeys(counts_of(node, training).unknown)))


def checkpointed(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graphs of blocks that are checkpointed, and of those within them."""
    for node in gm.graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and "checkpoint" in node.target.name():
            for block in _bodies(node, gm):
                yield block
                yield from checkpointed(block)


def _bodies(node: fx.Node, gm: fx.GraphModule) -> list[fx.GraphModule]:
    held = [getattr(gm, taken.target, None) for taken in node.all_input_nodes if taken.op == "get_attr"]
    return [body for body in held if isinstance(body, fx.GraphModule)]


def _of_higher_order(node: fx.Node, gm: fx.GraphModule, profile: Profile, training: bool) -> Iterator[Part]:
    name, trained, bodies = node.target.name(), training and trains(node), _bodies(node, gm)
    if name == "flex_attention" or not bodies:
        counts = _of_flex_attention(node) if name == "flex_attention" else counts_of(node, training)
        forward, backward = (prices.of_counts(counts, profile, side) for side in (False, True))
        if forward.kernels:
            yield Part(node, forward, backward if trained else Price(), unknown=tuple(counts.unknown))
        return
    if name == "autograd_function_apply":
        yield from (replace(part, backward=Price(), within=name) for part in parts(bodies[0], profile, False))
        if trained:
            yield from (_turned(part, name) for part in parts(bodies[1], profile, False))
        return
    found = [list(parts(body, profile, trained)) for body in bodies]
    times, within = 1, name
    if name in ("cond", "switch"):
        found = [max(found, key=_seconds)]
        within = f"{name}, the dearest of {len(bodies)} branches"
    elif name.startswith("while_loop"):
        within = f"{name}, one iteration"
    elif name in ("scan", "associative_scan", "map_impl"):
        lengths = [t.shape[0] for t in given_to(node) if t.dim()] if name == "map_impl" else _lengths(node)
        times = int(lengths[0]) if lengths else 1
        within = f"{name}, {times} times"
    again = "checkpoint" in name and trained
    for part in (part for body in found for part in body):
        backward = part.backward + part.forward if again else part.backward
        yield replace(part, forward=part.forward * times, backward=backward * times, within=part.within or within)


def _lengths(node: fx.Node) -> list[int]:
    """Of what scan goes along."""
    scanned = [value for argument in node.args[2:3] for value in argument]
    return [t.shape[0] for taken in scanned for t in results_of(taken)]


def _seconds(found: list[Part]) -> float:
    return sum(part.forward.seconds + part.backward.seconds for part in found)


def _turned(part: Part, within: str) -> Part:
    """A node of backward's own graph."""
    return replace(part, forward=Price(), backward=part.forward, within=within)


def _of_flex_attention(node: fx.Node) -> Counts:
    """As if no block were left out: which are depends on numbers. Backward has five products where forward has two."""
    tensors = [results_of(taken)[0] for taken in node.args[:3]]
    flops = sdpa_flop_count(*(tensor.shape for tensor in tensors))
    given, written = bytes_in(given_to(node)), bytes_in(results_of(node)[:2])
    gradients = bytes_in(t for t in given_to(node) if t.requires_grad)
    forward = kernel_with("attention", given, written, flops, tensors)
    backward = kernel_with("attention", given + 2 * written, gradients, 2.5 * flops, tensors)
    return Counts([forward], [backward])


def _of_gradients(node: fx.Node, profile: Profile) -> Iterator[Part]:
    """`torch.func.grad` and its like, within a graph: the backward of all nodes between the results and the inputs."""
    results, inputs = node.args[0], node.args[1]
    ends = {taken for taken in (inputs if isinstance(inputs, (list, tuple)) else [inputs])}
    queue = list(results if isinstance(results, (list, tuple)) else [results])
    seen: set[fx.Node] = set()
    total = Price()
    while queue:
        current = queue.pop()
        if isinstance(current, fx.Node) and current not in seen and current not in ends:
            seen.add(current)
            queue += current.all_input_nodes
            total += prices.of_counts(counts_of(current, training=True), profile, backward=True)
    if total.kernels:
        yield Part(node, total, Price())
