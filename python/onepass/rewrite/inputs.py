"""Which inputs of a graph lie in the same memory: in the call that was captured, and in those that follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, fx

from onepass.graph.effects import SHARES, effects_of, memory_of, tensors_of
from onepass.rewrite.checkpoints import checkpointed_blocks

__all__ = ["by_memory"]

Pattern = tuple[int, ...]
"""A number for each input; inputs with the same number may share memory."""


def by_memory(
    gm: fx.GraphModule, inputs: Sequence[object], prepare: Callable[[fx.GraphModule, bool], Callable]
) -> Callable:
    """The graph as it is to be called, once it is prepared. Where a graph writes to an input, whether another one lies
    in the same memory decides what is read when, and Dynamo's captures serve calls of either kind. Such a graph is
    prepared once for each pattern of memory in which its inputs come. (Parameters and buffers are taken to lie to each
    other as in the first call.)

    Args:
        inputs: the tensors of the call that was captured, in the order of the graph's placeholders.
        prepare: makes a graph ready; it is also told whether this is the graph for the call that was captured.
    """
    places = _concerned(gm.graph)
    if not places:
        return prepare(gm, True)
    pristine, first = copied(gm), pattern_of([inputs[i] for i in places])
    _mark(gm.graph, places, first)
    ready = {first: prepare(gm, True)}

    def call(*inputs):
        pattern = pattern_of([inputs[i] for i in places])
        if pattern not in ready:
            other = copied(pristine)
            _mark(other.graph, places, pattern)
            ready[pattern] = prepare(other, False)
        return ready[pattern](*inputs)

    return call


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph and its checkpointed blocks, to be changed; all else is shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    made = fx.GraphModule(gm, graph)
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(block := getattr(gm, str(node.target), None), fx.GraphModule):
            setattr(made, node.target, copied(block))
    return made


def pattern_of(values: Sequence[object]) -> Pattern:
    """Which of these tensors have storages that overlap."""
    spans = []
    for i, value in enumerate(values):
        for part in tensors_of(value):
            try:
                storage = part.untyped_storage()
                spans.append((storage.data_ptr(), storage.nbytes(), i))
            except (NotImplementedError, RuntimeError):  # a sparse tensor, or one without data
                return (0,) * len(values)
    numbers = list(range(len(values)))
    end, last = 0, None
    for begin, size, i in sorted(spans):
        if last is not None and begin < end:
            before, now = numbers[i], numbers[last]
            numbers = [now if number == before else number for number in numbers] if before != now else numbers
        if size and begin + size > end:
            end, last = begin + size, i
    return tuple(numbers)


def _concerned(graph: fx.Graph) -> list[int]:
    """The inputs whose memory matters: those that are written, and those that may come to lie where these do."""
    places = [node for node in graph.nodes if node.op == "placeholder"]
    written = frozenset().union(*(effects_of(node).writes for node in graph.nodes))
    overwritten = [node for node in places if memory_of(node.meta.get("example_value")) & written]
    if not overwritten:
        return []
    all_of_module = all(map(_is_of_module, overwritten))
    return [
        i
        for i, node in enumerate(places)
        if isinstance(node.meta.get("example_value"), Tensor)
        and (node in overwritten or not (all_of_module and _is_of_module(node)))
    ]


def _is_of_module(node: fx.Node) -> bool:
    """Whether it is a parameter or a buffer."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    return source is not None and source.guard_source.is_unspecialized_nn_module()


def _mark(graph: fx.Graph, places: Sequence[int], pattern: Pattern) -> None:
    """Says of the inputs with the same number that their memory is one."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    shared = {}
    for i, number in zip(places, pattern):
        shared[number] = shared.get(number, frozenset()) | memory_of(inputs[i].meta["example_value"])
    _mark_all(graph, [memory for memory in shared.values() if len(memory) > 1])


def _mark_all(graph: fx.Graph, shared: Sequence[frozenset[int]]) -> None:
    for node in graph.nodes:
        if node.op == "placeholder":
            memory = memory_of(node.meta.get("example_value"))
            node.meta[SHARES] = frozenset().union(*(other for other in shared if other & memory))
    for block in checkpointed_blocks(graph):
        _mark_all(block.graph, shared)
