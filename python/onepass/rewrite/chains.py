"""Finds in a captured graph what a line can say: chains of words, each as long as it can be."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from onepass._native import LineError
from onepass.line import _parse
from onepass.reference import ACTIVATIONS
from onepass.rewrite.operations import is_tensor, modes, operation, value_of
from onepass.rewrite.steps import ROW_WORDS, Step, kind, steps

__all__ = ["Chain", "Order", "chains", "with_less_saved"]

LONGEST_FORMULA = 10
"""Nodes from x to the result."""
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Chain:
    """A line, and the part of a graph that it is the same as.

    `results` are the nodes whose values the line returns: the result, then the kept ones that are asked for, in order.
    """

    words: tuple[str, ...]
    x: fx.Node
    operands: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    nodes: frozenset[fx.Node]

    @property
    def line(self) -> str:
        return " | ".join(self.words)

    @property
    def result(self) -> fx.Node:
        return self.results[0]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return self.x, *self.operands

    @property
    def is_whole(self) -> bool:
        """Whether what it returns has x's dtype, as a line's results have, and whether, where it passes through views,
        all of it can be viewed alike."""
        x, results = value_of(self.x), [value_of(node) for node in self.results]
        if any(result.dtype != x.dtype for result in results):
            return False
        if all(result.shape == x.shape for result in results):
            return True
        symbolic = any(isinstance(size, torch.SymInt) for result in results for size in result.shape)
        operands = [value_of(node) for node in self.operands]
        return not symbolic and all(o.dim() == 1 or o.numel() == x.numel() for o in operands)

    def extended(self, step: Step, keeps: bool) -> Chain | None:
        """With one more step; the value before it is returned, too, where others need it."""
        words, kept = self.words, self.results[1:]
        if keeps:
            words, kept = (*words, "keep"), (*kept, self.result)
        if step.words == ("gate",):
            if keeps or not words or kind(words[-1]) not in ACTIVATIONS:
                return None
            words = (*words[:-1], f"gate({words[-1]})")
        else:
            words = (*words, *step.words)
        if not _is_line(words):
            return None
        return Chain(words, self.x, self.operands + step.operands, (step.result, *kept), self.nodes | step.nodes)

    @property
    def has_row_word(self) -> bool:
        return any(kind(word) in ROW_WORDS for word in self.words)


def with_less_saved(chain: Chain) -> Chain:
    """For training: the sum before a norm is kept where backward would else need all that was added. Forward writes
    more, and backward reads as much less."""
    row = next((i for i, word in enumerate(chain.words) if kind(word) in ("layer_norm", "rms_norm")), 0)
    before = chain.words[:row]
    if "keep" in chain.words or not any(kind(word) in ("add", "gate") for word in before):
        return chain
    return replace(chain, words=(*before, "keep", *chain.words[row:]))


class Order:
    """Where the nodes of a graph stand, in which modes, and where something is overwritten."""

    def __init__(self, graph: fx.Graph) -> None:
        self.index = {node: i for i, node in enumerate(graph.nodes)}
        self.nodes = list(graph.nodes)
        self.modes = modes(graph)
        self.overwrites = [node for node in graph.nodes if _overwrites(node)]

    def depends(self, node: fx.Node, on: frozenset[fx.Node]) -> bool:
        """Whether a node is computed from one of these."""
        first = min(self.index[other] for other in on)
        seen, queue = set(), [node]
        while queue:
            current = queue.pop()
            if current in on:
                return True
            if current not in seen and self.index[current] > first:
                seen.add(current)
                queue += current.all_input_nodes
        return False

    def place(self, chain: Chain) -> fx.Node | None:
        """The node behind which the chain's line may stand: what it takes is there, nobody has asked for its results,
        and modes are the chain's. None if there is no such place, if the chain has nodes of several modes, or if any
        of these tensors is overwritten: backward may need it."""
        if any(self.depends(node, chain.nodes) for node in chain.inputs) or self._is_overwritten(chain):
            return None
        first, *others = sorted(self.index[node] for node in chain.nodes)
        mode = self.modes[first]
        if any(self.modes[i] != mode for i in others):
            return None
        last = max(first, *(self.index[node] for node in chain.inputs))
        asked = (self.index[u] for node in chain.results for u in node.users if u not in chain.nodes)
        places = range(last, min(asked, default=len(self.nodes)))
        return next((self.nodes[i] for i in places if self.modes[i] == mode), None)

    def _is_overwritten(self, chain: Chain) -> bool:
        written = {_memory(node.kwargs.get("out", node.args[0])) for node in self.overwrites if node not in chain.nodes}
        return bool(written) and any(_memory(node) in written for node in (*chain.inputs, *chain.results))


def chains(graph: fx.Graph, gain: Callable[[Chain], float]) -> list[Chain]:
    """The lines of a graph, in its order, none of which has a node with another in common: those that gain something,
    and of these the ones that gain the most before others."""
    order, found, claimed = Order(graph), [], set()
    steps_of = functools.cache(lambda node: tuple(steps(node)))  # a node is the end of many chains
    begun = [Chain((), x, (), (x,), frozenset()) for x in graph.nodes if _is_row(x)]
    ways = [chain for first in begun for chain in _grown(first, steps_of)]
    ways = [(gain(chain), chain) for chain in ways if chain.words and chain.is_whole and order.place(chain)]
    ways.sort(key=lambda way: (-way[0], len(way[1].nodes)))
    for gained, chain in ways:
        if gained > 0 and not chain.nodes & claimed:
            found.append(chain)
            claimed |= chain.nodes
    return sorted(found, key=lambda chain: order.index[chain.result])


def _is_row(node: fx.Node) -> bool:
    return is_tensor(node) and value_of(node).dtype in FLOATING and value_of(node).dim() > 0


def _grown(chain: Chain, steps_of: Callable[[fx.Node], tuple[Step, ...]]) -> Iterator[Chain]:
    """The chain, and all that continue it."""
    yield chain
    value = chain.result
    for step in (step for end in _ends(value, chain) for step in steps_of(end) if step.x is value):
        begins = not chain.nodes
        moves_nothing = not step.words and operation(step.result).name != "cast"
        others = not begins and any(user not in step.nodes for user in value.users)
        if begins and moves_nothing or others and not any(kind(word) in ROW_WORDS for word in step.words):
            continue  # two chains would move less than one that keeps a value
        if (longer := chain.extended(step, keeps=others)) is not None:
            yield from _grown(longer, steps_of)


def _ends(value: fx.Node, chain: Chain) -> list[fx.Node]:
    """Where what is done to a value may end: its users, and the last nodes of formulas that begin with it."""
    found, nearest = [], list(value.users)
    for _ in range(LONGEST_FORMULA):
        nearest = [user for user in nearest if user not in found and user not in chain.nodes and is_tensor(user)]
        found += dict.fromkeys(nearest)
        nearest = [further for user in nearest if operation(user) is not None for further in user.users]
    return found


def _is_line(words: tuple[str, ...]) -> bool:
    try:
        return not words or _parse(" | ".join(words)) is not None
    except LineError:
        return False


def _memory(node: object) -> object:
    """The same for all views of a tensor."""
    return value_of(node).untyped_storage()._cdata if is_tensor(node) else None


def _overwrites(node: fx.Node) -> bool:
    """Whether the node may change a tensor that was there before it."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    inplace = name.endswith("_") and not name.endswith("__")
    told = "out" in node.kwargs or node.kwargs.get("inplace") is True
    told |= node.args[-1:] != () and node.args[-1] is True and operation(node) is None  # F.relu(x, True), say
    return bool(node.args) and (inplace or told or node.target in _ASSIGNS)


_ASSIGNS = {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ior}
