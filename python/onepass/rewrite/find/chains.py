"""Finds in a captured graph what a line can say: chains of words, each as long as it can be."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Size, Tensor, fx

from onepass._native import LineError
from onepass.graph.effects import UNKNOWN, Memory, bodies, effects_of, evaluated, memory_of
from onepass.graph.operations import is_contiguous, is_tensor, modes, operation, results_of, same_shape, value_of
from onepass.line import _parse
from onepass.rewrite.find import rotary
from onepass.rewrite.find.steps import Step, steps
from onepass.word import about

__all__ = ["Chain", "Order", "apart", "chains", "inverse", "is_column", "lies_as", "permuted", "with_less_saved"]

LONGEST_FORMULA = 10
"""Nodes from x to the result."""
LONGEST_LINE = 32
"""Words. Longer chains are several lines: what a kernel takes to compile grows faster than its words."""
HOLDS = {
    torch.float64: {torch.float64},
    torch.float32: {torch.float32},
    torch.bfloat16: {torch.bfloat16, torch.float32},
    torch.float16: {torch.float16, torch.float32},
}
"""The types of what a line may compute from rows of a type: those that hold all of it, and no more than it computes
in."""
WIDE = "keep(float32)"
"""Of a value of float32 beside x of 16 bits, as residual streams are under autocast."""


@dataclass(frozen=True)
class Chain:
    """A line, and the part of a graph that it is the same as.

    `results` are the nodes whose values the line returns: the result, then the kept ones that are asked for, in order.
    `met` are the shapes of the values that operands met on the way, None of a matrix. `passes` are casts and views that
    it looks through and that others may need as well. Where it passes a permutation of the dimensions before the last,
    `orders` are those in which the result has the dimensions of each input, () where they are as they were; the shapes
    that were met are in the result's order. `taken` are the nodes whose values the words take, one for each word, as
    long as nothing else was joined.
    """

    words: tuple[str, ...]
    x: fx.Node
    operands: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    nodes: frozenset[fx.Node]
    met: tuple[Size | None, ...] = ()
    passes: frozenset[fx.Node] = frozenset()
    orders: tuple[tuple[int, ...], ...] = ()
    taken: tuple[fx.Node, ...] = ()

    @property
    def line(self) -> str:
        return " | ".join(self.words)

    @property
    def result(self) -> fx.Node:
        return self.results[0]

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return self.x, *self.operands

    def has(self, *kinds: str) -> bool:
        """Whether one of its words is of one of these kinds."""
        return any(about(word).kind in kinds for word in self.words)

    @property
    def kinds(self) -> list[str]:
        """What each operand is to its word."""
        known = [about(word) for word in self.words]
        return [word.operand for word in known if word.operand != "none" for _ in range(word.operands)]

    @property
    def has_linear(self) -> bool:
        return any(about(word).operand == "matrix" for word in self.words)

    @property
    def is_viewed(self) -> bool:
        """Whether rows are counted otherwise somewhere between x and the results."""
        x, *_ = self.orders or ((),)
        shapes = [permuted(value_of(self.x).shape, x), *(value_of(node).shape for node in self.results)]
        shapes += [m for m in self.met if m is not None]
        return not all(same_shape(shape[:-1], shapes[0][:-1]) for shape in shapes)

    @property
    def is_whole(self) -> bool:
        """Whether what it returns has x's dtype, as a line's results have, or that in which a value is kept. Where rows
        are counted otherwise on the way, all of it must be viewed alike: sizes are numbers, and each operand is a
        column, a matrix or has a number for each of the value's."""
        x, results = value_of(self.x), [value_of(node) for node in self.results]
        kept = [torch.float32 if word == WIDE else x.dtype for word in self.words if about(word).kind == "keep"]
        if any(result.dtype != dtype for result, dtype in zip(results, (x.dtype, *kept))):
            return False
        if not self.is_viewed:
            return True
        if any(about(word).operand in ("keys", "values") for word in self.words):
            return False
        tensors = [x, *results, *(value_of(node) for node in self.operands)]
        if any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape):
            return False
        return all(
            m is None or is_column(value_of(o), m) or value_of(o).shape == m for o, m in zip(self.operands, self.met)
        )

    @property
    def is_line(self) -> bool:
        """Whether its words can be read, and take its operands."""
        return is_line(self.words) and self._has_columns_for_all()

    def _has_columns_for_all(self) -> bool:
        """Whether no column is for some rows only, or there is no contraction, which knows none of that kind."""
        if not self.has("contraction"):
            return True
        return all(kind != "column" or value_of(o).dim() == 1 for kind, o in zip(self.kinds, self.operands))

    def extended(self, step: Step, keeps: bool) -> Chain | None:
        """With one more step; the value before it is returned, too, where others need it."""
        words, kept, taken = self.words, self.results[1:], self.taken
        if keeps:
            words, kept, taken = (*words, self._keep_of(self.result)), (*kept, self.result), (*taken, self.result)
        if step.words == ("gate",):
            if keeps or not words or about(words[-1]).kind != "activation":
                return None
            words = (*words[:-1], f"gate({words[-1]})")
        elif _is_said_by_gate(step.words, words, keeps):
            return None
        else:
            words, taken = (*words, *step.words), (*taken, *[step.x] * len(step.words))
        if len(words) > LONGEST_LINE or not is_line(words) or not all(map(self._holds, step.nodes | step.passes)):
            return None
        if any(map(_has_machine_epsilon, step.words)) and value_of(step.x).dtype != value_of(self.x).dtype:
            return None  # it is that of the type it is of
        met = self.met + (value_of(step.x).shape,) * len(step.operands)
        results, operands, nodes = (step.result, *kept), self.operands + step.operands, self.nodes | step.nodes
        orders = self.orders and self.orders + ((),) * len(step.operands)
        if step.order:
            if kept or self.is_viewed:
                return None
            orders = tuple(permuted(before, step.order) for before in orders or ((),) * len(self.inputs))
            met = tuple(permuted(shape, step.order) for shape in met)
        passes = (self.passes | step.passes) - nodes
        longer = Chain(words, self.x, operands, results, nodes, met, passes, orders, taken)
        if orders and (longer.is_viewed or longer.has("dropout")):
            return None  # rows cannot be counted, or what is drawn would follow their order
        return longer if longer._has_columns_for_all() else None

    def _keep_of(self, node: fx.Node) -> str:
        """The word that keeps a node's value as it is."""
        return WIDE if value_of(node).dtype == torch.float32 and value_of(self.x).dtype.itemsize == 2 else "keep"

    def keeping(self, at: int) -> Chain:
        """With what the word there takes kept; for nobody, where nobody asks for it, so that backward has it."""
        node = self.taken[at]
        words = (*self.words[:at], self._keep_of(node), *self.words[at:])
        results = (self.result, node, *self.results[1:]) if self.has("keep") else self.results
        return replace(self, words=words, results=results, taken=(*self.taken[:at], node, *self.taken[at:]))

    def _holds(self, node: fx.Node) -> bool:
        """Whether nothing is lost where x's numbers take the node's type."""
        value = value_of(node)
        return not isinstance(value, Tensor) or value.dtype in HOLDS[value_of(self.x).dtype]


def _is_said_by_gate(words: tuple[str, ...], before: tuple[str, ...], keeps: bool) -> bool:
    """Whether there is a chain with `gate` that says the same: of a product with what an activation gave, and of one
    that begins a line."""
    if words == ("times",):
        return bool(before) and not keeps and about(before[-1]).kind == "activation"
    return not before and any(word.startswith("gated(") for word in words)


def _has_machine_epsilon(word: str) -> bool:
    """Whether that is the word's number."""
    return "(" not in word and any(map(math.isnan, about(word).parameters))


def permuted(of: Sequence, order: tuple[int, ...]) -> tuple:
    """Sizes, or dimensions that were permuted before, in this order; () stands for that in which they are."""
    return tuple(of[dim] for dim in order) if of and order else tuple(of or order)


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """That which takes a permutation back."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def is_column(operand: Tensor, shape: Size) -> bool:
    """Whether it is one row's numbers, for all rows of this shape."""
    return operand.dim() == 1 and same_shape(operand.shape, shape[-1:])


def with_less_saved(chain: Chain) -> Chain:
    """For training: a sum is kept where backward would else need all that was added. Forward writes more, and backward
    reads as much less. So is the sum before a norm, and one of products, which nobody else holds, before a word that
    needs it, as an adapter's before an activation."""
    if any(about(word).kind == "keep" for word in chain.words[:-1]):
        return chain
    at = next((i for i, word in enumerate(chain.words) if "normalises" in about(word).properties), None)
    if at is None:
        at = 0 if chain.has("keep") else _sum_of_products(chain)
    if not any(about(word).operand == "tensor" for word in chain.words[:at]):
        return chain
    longer = chain.keeping(at)
    return longer if is_line(longer.words) else chain


def _sum_of_products(chain: Chain) -> int:
    """How many words add up products, where others stand behind them; else 0."""
    adds = next((i for i, word in enumerate(chain.words) if not _needs_nothing(word)), 0)
    if chain.has("row", "contraction"):
        return 0
    added = [o for kind, o in zip(chain.kinds, chain.operands) if kind == "tensor"]
    count = sum(about(word).operand == "tensor" for word in chain.words[:adds])
    seen = chain.nodes | chain.passes
    freed = all(_is_product(node) and set(node.users) <= seen for node in (chain.x, *added[:count]))
    return adds if freed and all(set(node.users) <= seen for node in chain.passes) else 0


def _needs_nothing(word: str) -> bool:
    """Whether a word's backward needs neither x nor an operand: a sum, or a product with a number."""
    known = about(word)
    return "adds" in known.properties or known.operand == "none" and "scales" in known.properties


def _is_product(node: fx.Node) -> bool:
    """Whether its result is held by nobody for its own backward."""
    op = operation(node)
    return op is not None and op.name in ("linear", "addmm", "matmul")


class Order:
    """Where the nodes of a graph stand, in which modes, what they write, and who may see what they give. Whoever puts
    something in another's place asks here; what cannot be proven to be the same stays as it is."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.memory = Memory(graph)
        written = ((node, self.memory.named(effects_of(node).writes)) for node in graph.nodes)
        self.writes = {node: memory for node, memory in written if memory}
        self.draws = [node for node in graph.nodes if effects_of(node).draws]
        self.look()

    def look(self) -> None:
        """Where nodes stand now: lines have been put there since, which write nothing."""
        self.index = {node: i for i, node in enumerate(self.graph.nodes)}
        self.nodes = list(self.graph.nodes)
        self.modes = modes(self.graph)

    def is_transformed(self, node: fx.Node) -> bool:
        """Whether it stands within a level of `torch.func`, where a function of autograd cannot be called with tensors
        that the level does not wrap (torch.vmap asserts)."""
        return any(name.endswith("_increment_nesting") for name in self._entered(node))

    def is_inferred(self, node: fx.Node) -> bool:
        """Whether what it gives is made in `torch.inference_mode` within the graph: no backward may save that."""
        return any("inference_mode" in name for name in self._entered(node))

    def _entered(self, node: fx.Node) -> list[str]:
        _, *entered = self.modes[self.index[node]]
        return [within.target.__name__ for within in entered]

    def in_one_mode(self, *nodes: fx.Node) -> bool:
        """Whether they all stand where the same modes hold."""
        return len({self.modes[self.index[node]] for node in nodes}) == 1

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

    def is_written(
        self, nodes: frozenset[fx.Node] | set[fx.Node], since: int, but: frozenset[fx.Node] = frozenset()
    ) -> bool:
        """Whether the memory of one of these is written behind a place, by others than these."""
        writes = [
            memory for node, memory in self.writes.items() if node not in but and self.index.get(node, -1) > since
        ]
        if not writes:
            return False
        memory = frozenset().union(*map(self.memory.of, nodes))
        return any(UNKNOWN in written or written & memory for written in writes)

    def place(self, chain: Chain) -> fx.Node | None:
        """The node behind which the chain's line may stand: what it takes is there, nobody has asked for its results,
        and modes are the chain's. None if there is no such place, or if somebody could tell the line from the chain:
        the chain has nodes of several modes, its tensors are overwritten (backward may need them), its results lie in
        memory otherwise than the line's, or somebody may ask for the gradient of a kept value, or of one that it looks
        through."""
        if not chain.is_whole:
            return None
        seen = chain.nodes | chain.passes
        first, begin = (min(self.index[node] for node in nodes) for nodes in (chain.nodes, seen))
        mode = self.modes[first]
        if any(self.modes[self.index[node]] != mode for node in seen):
            return None
        if any(self.depends(node, chain.nodes) for node in chain.inputs):
            return None
        if self.is_written({*chain.inputs, *seen}, begin, chain.nodes) or not self.is_new_memory(chain):
            return None
        if self.layout(chain) is None:
            return None
        if any(self.shows_gradient(node, chain.nodes) for node in (*chain.results[1:], *chain.passes)):
            return None
        last = max(first, *(self.index[node] for node in chain.inputs), self.last_draw_before(chain.nodes))
        asked = (self.index[u] for node in chain.results for u in node.users if u not in chain.nodes)
        places = range(last, min(asked, default=len(self.nodes)))
        return next((self.nodes[i] for i in places if self.modes[i] == mode), None)

    def last_draw_before(self, nodes: frozenset[fx.Node]) -> int:
        """The last of the graph's nodes that draws random numbers before one of these does: its numbers stay what they
        are under a seed. -1 if there is none, or where these do not draw."""
        drawn = min((self.index[node] for node in nodes if effects_of(node).draws), default=0)
        return max(
            (self.index[node] for node in self.draws if node not in nodes and self.index.get(node, drawn) < drawn),
            default=-1,
        )

    def layout(self, chain: Chain) -> tuple[int, ...] | None:
        """The order of dimensions in which the chain's results lie one number behind the other: a line is called with
        dimensions in this order, so that strides are what they were. Where there is no such order (nor for dropout,
        whose masks would follow it), that which they have, if nobody can see strides; else None."""
        results = [value_of(node) for node in chain.results]
        as_it_is = tuple(range(results[0].dim()))
        if all(map(is_contiguous, results)):
            return self._layout_for_attention(chain) or as_it_is
        orders = [inverse(chain.orders[0])] if chain.orders else []  # x's own
        static = all(isinstance(size, int) for result in results for size in (*result.shape, *result.stride()))
        if static and not chain.is_viewed and not chain.has("contraction", "dropout"):
            first = results[0]
            order = tuple(sorted(as_it_is, key=lambda dim: (-first.stride(dim), first.shape[dim] == 1, dim)))
            of_rows = chain.has("row", "rotary") or any(about(word).operand == "column" for word in chain.words)
            if not of_rows or order[-1] == as_it_is[-1]:
                orders.append(order)
        for order in orders:
            if all(is_contiguous(result.permute(order)) for result in results):
                return order
        lying = {n: value.new_empty(value.shape) for n, value in zip(chain.results, results)}
        return as_it_is if self.absorbs(lying, chain.nodes) else None

    def _layout_for_attention(self, chain: Chain) -> tuple[int, ...] | None:
        """Of heads that attention alone takes, and eager joins anew: x's order of dimensions. Attention's result lies
        as its queries do, and heads are turned back without a copy where their rows are those of x."""
        x, result = value_of(chain.x), value_of(chain.result)
        if len(chain.results) > 1 or chain.is_viewed or chain.orders or chain.has("contraction", "dropout"):
            return None
        static = all(isinstance(size, int) for size in (*x.shape, *x.stride(), *result.shape))
        if not static or not chain.result.users or not all(map(_attends, chain.result.users)):
            return None
        order = tuple(sorted(range(x.dim()), key=lambda dim: (-x.stride(dim), x.shape[dim] == 1, dim)))
        if order == tuple(range(x.dim())) or order[-1] != x.dim() - 1:
            return None
        lying = result.new_empty(permuted(result.shape, order)).permute(inverse(order))
        return order if self.absorbs({chain.result: lying}, chain.nodes) else None

    def absorbs(self, given: dict[fx.Node, Tensor], chain: frozenset[fx.Node] = frozenset()) -> bool:
        """Whether nobody can see that these nodes give these tensors, which lie in memory otherwise than before: what
        is computed from them is run again, until it lies as it did."""
        changed, first = dict(given), min(self.index[node] for node in given)
        written = self.is_written(set(given), first, chain)
        for node in self.nodes[first:]:
            taken = changed.keys() & set(node.all_input_nodes)
            if node in chain or node in given or not taken:
                continue
            effects = effects_of(node)
            if written or node.op == "output" or not effects.known or effects.by_strides:
                return False
            if self.is_written({node}, self.index[node], chain):
                return False
            try:
                value = evaluated(node, torch.no_grad(), values=changed)
            except Exception:  # a view that there is not, say
                return False
            before = self.memory.of(node) & frozenset().union(*map(self.memory.of, taken))
            if not before and memory_of(value) & memory_of([changed[n] for n in taken]):
                if any(map(self.is_given, (node, *taken))):
                    return False  # a view where there was a copy: nobody writes to either
            if not lies_as(value, value_of(node)):
                changed[node] = value
        return True

    def replaces(self, node: fx.Node, target: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Has a node call this, and says so; where somebody can see that its result lies otherwise then, it calls what
        it did."""
        before = node.target, node.args, node.kwargs
        node.target, node.args, node.kwargs = target, args, kwargs
        given = evaluated(node)
        if lies_as(given, value_of(node)) or self.absorbs({node: given}):
            return True
        node.target, node.args, node.kwargs = before
        return False

    def attends(self, node: fx.Node, arguments: tuple) -> bool:
        """Has a call of PyTorch's attention take these arguments, in the order that `operation` gives them in, if that
        may be: `replaces`."""
        names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        return self.replaces(node, node.target, arguments[:3], dict(zip(names, arguments[3:], strict=True)))

    def is_given(self, node: fx.Node) -> bool:
        """Whether the graph, or one within it, is given the node's memory: the value, a view of it, or what a call gave
        back as it was."""
        return bool(self.memory.of(node) & self.given())

    def given(self) -> frozenset[int]:
        """All memory that the graph, or one within it, is given."""
        takers = (taker for taker in self.graph.nodes if taker.op == "output" or bodies(taker))
        return frozenset().union(*(self.memory.of(taken) for taker in takers for taken in taker.all_input_nodes))

    def is_new_memory(self, chain: Chain) -> bool:
        """Whether each of its results has memory of its own, as a line's results have. What the chain itself overwrites
        is as good as its own: nobody else has it (see operation())."""
        written = frozenset().union(*(self.memory.named(effects_of(node).writes) for node in chain.nodes))
        taken = set().union(*map(self.memory.of, chain.inputs)) - written
        for node in chain.results:
            memory = self.memory.of(node)
            if memory & taken:
                return False
            taken |= memory
        return True

    def shows_gradient(self, node: fx.Node, chain: frozenset[fx.Node]) -> bool:
        """Whether somebody may ask for the gradient of a value on the way, which a line does not have as a whole: it is
        a result of the graph, or something unknown sees it. The same holds for what is a view of it."""
        if not any(tensor.requires_grad for tensor in results_of(node)):
            return False
        memory, queue, seen = self.memory.of(node), [node], set()
        while queue:
            for user in queue.pop().users:
                if user in chain or user in seen:
                    continue
                if user.op == "output" or not effects_of(user).known:
                    return True
                seen.add(user)
                if self.memory.of(user) & memory:
                    queue.append(user)
        return False


def _attends(node: fx.Node) -> bool:
    op = operation(node)
    return op is not None and op.name == "attention"


def is_view(value: object) -> bool:
    """Of a tensor: whether it is a view for autograd."""
    return isinstance(value, Tensor) and value._is_view()


def lies_as(value: object, other: object) -> bool:
    """Whether two tensors, or all tensors of two lists, have the same shape and strides."""
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(lies_as, value, other))
    if not isinstance(value, Tensor):
        return True
    return same_shape(value.shape, other.shape) and same_shape(value.stride(), other.stride())


def chains(graph: fx.Graph, gain: Callable[[Chain], float]) -> list[Chain]:
    """The lines of a graph, in its order, none of which has a node with another in common: those that gain something,
    and of these the ones that gain the most before others."""
    order = Order(graph)
    steps_of = functools.cache(lambda node: tuple(steps(node)))  # a node is the end of many chains
    begun = [Chain((), x, (), (x,), frozenset()) for x in graph.nodes if _is_row(x)]
    ways = [chain for first in begun for chain in _grown(first, steps_of)]
    ways = [(gained, chain) for chain in ways if chain.words and chain.is_whole and (gained := gain(chain)) > 0]
    ways.sort(key=lambda way: (-way[0], len(way[1].nodes)))
    found = apart((chain for _, chain in ways), lambda chain: order.place(chain) is not None)
    return sorted(found, key=lambda chain: order.index[chain.result])


def apart(chains: Iterable[Chain], allowed: Callable[[Chain], bool] = lambda _: True) -> list[Chain]:
    """Those that are allowed, have no node in common with one before and take nothing within one: a formula may
    begin with the tensor of which another chain's result is only another name."""
    found: list[Chain] = []
    nodes, within, taken = set(), set(), set()
    for chain in chains:
        inside = chain.nodes - set(chain.results)
        if not (chain.nodes & nodes or within & set(chain.inputs) or inside & taken) and allowed(chain):
            found.append(chain)
            nodes |= chain.nodes
            within |= inside
            taken |= set(chain.inputs)
    return found


def _is_row(node: fx.Node) -> bool:
    return is_tensor(node) and value_of(node).dtype in HOLDS and value_of(node).dim() > 0


def _grown(chain: Chain, steps_of: Callable[[fx.Node], tuple[Step, ...]]) -> Iterator[Chain]:
    """The chain, and all that continue it."""
    yield chain
    value = chain.result
    for step in (step for end in _ends(value, chain) for step in steps_of(end) if step.x is value):
        begins = not chain.nodes
        moves_nothing = not step.words and operation(step.result).name != "cast"
        others = not begins and any(user not in step.nodes for user in value.users)
        if begins and moves_nothing or others and not _may_keep(chain, step):
            continue
        if (longer := chain.extended(step, keeps=others)) is not None:
            yield from _grown(longer, steps_of)


def _may_keep(chain: Chain, step: Step) -> bool:
    """Whether a chain may go on behind a value that others need: two chains would move less than one that keeps it, but
    where a row word takes it, or where what is kept in float32 is the result of a norm that others take as x's type."""
    if step.words:
        return any(about(word).kind == "row" for word in step.words)
    return chain.has("row") and value_of(step.result).dtype == value_of(chain.x).dtype != value_of(chain.result).dtype


def _ends(value: fx.Node, chain: Chain) -> list[fx.Node]:
    """Where what is done to a value may end: its users, and the last nodes of formulas that begin with it."""
    found, nearest = {}, list(value.users)
    for _ in range(LONGEST_FORMULA):
        nearest = [user for user in dict.fromkeys(nearest) if user not in found and user not in chain.nodes]
        found |= dict.fromkeys(nearest)
        known = [user for user in nearest if operation(user) is not None or rotary.may_have(user)]
        nearest = [further for user in known for further in user.users]
    return list(found)


def is_line(words: tuple[str, ...]) -> bool:
    """Whether the words, or none, are one that can be read."""
    try:
        return not words or _parse(" | ".join(words)) is not None
    except LineError:
        return False
