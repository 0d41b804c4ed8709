"""Checkpointed blocks of a captured graph: graphs of their own, which backward runs again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch._higher_order_ops.wrap import TagActivationCheckpoint, tag_activation_checkpoint
from torch.utils.checkpoint import checkpoint

from onepass.graph.effects import bodies, changes_shapes, effects_of, memory_of
from onepass.graph.operations import value_of
from onepass.rewrite.modes import enters, leaves_as_found

__all__ = ["checkpointed_blocks", "differing_blocks", "draw_again"]


def checkpointed_blocks(graph: fx.Graph) -> Iterator[fx.GraphModule]:
    """The graphs of a graph's checkpointed blocks; these may have some, too. None where shapes change."""
    if not changes_shapes(graph):
        for node in graph.nodes:
            if node.target is tag_activation_checkpoint:
                yield from bodies(node)


def differing_blocks(graph: fx.Graph) -> set[fx.Node]:
    """The calls of blocks that `draw_again` leaves alone; asked before the blocks within them are prepared, of whose
    effects nothing is known then."""
    return {node for node in graph.nodes if node.target is tag_activation_checkpoint and _differs_within(node)}


def draw_again(graph: fx.Graph, left: set[fx.Node], nested: bool = False) -> None:
    """Makes checkpointed blocks draw the same random numbers when backward runs them again, as `torch.utils.checkpoint`
    does. The operator that Dynamo captures leaves that to Inductor.

    left: calls of blocks that stay what they are.
    nested: whether the graph is a checkpointed block itself.
    """
    for node in graph.nodes:
        if node.target is tag_activation_checkpoint and node not in left:
            node.target = functools.partial(_checkpointed, _held(graph, node, nested), enters(bodies(node)[0].graph))
            node.target.__name__ = "checkpointed"


def _differs_within(call: fx.Node) -> bool:
    """Whether a block within this one takes what follows from a tensor that this one overwrites. When backward runs
    this one again, that is another. Eager's inner block has the first from a closure and the other as an argument of
    `checkpoint`, and a captured graph does not say which it was. So the block stays what Dynamo captured, whose
    backward raises that the tensor was overwritten."""
    graph = bodies(call)[0].graph
    places = [node for node in graph.nodes if node.op == "placeholder"]
    memory = memory_of([value_of(node) for node in places]) & _written(graph)
    differ: set[fx.Node] = set()
    for node in graph.nodes:
        if not memory:
            return False
        if node.target is tag_activation_checkpoint and not differ.isdisjoint(node.all_input_nodes):
            return True
        written, own = _written_by(node), memory_of(value_of(node))
        # What an operator overwrites is none of what it makes its result of: batch_norm's averages.
        taken = [each for each in node.all_input_nodes if not memory_of(value_of(each)) & written]
        if own & memory or not differ.isdisjoint(taken):
            differ.add(node)
            memory |= own | written
    return False


def _written(graph: fx.Graph) -> frozenset[int]:
    """The memory that a block overwrites, before the blocks within it are prepared."""
    return frozenset().union(*map(_written_by, graph.nodes))


def _written_by(node: fx.Node) -> frozenset[int]:
    if node.target is tag_activation_checkpoint:
        return frozenset().union(*(_written(body.graph) for body in bodies(node)))
    return effects_of(node).writes


def _held(graph: fx.Graph, call: fx.Node, nested: bool) -> frozenset[int]:
    """The inputs of a block that are no arguments of `checkpoint`, which saves those: what the block overwrites, as a
    program has that in a closure. What is computed in a block around it is saved nevertheless: when that block runs
    again, it is computed anew, and no longer what was overwritten."""
    body = bodies(call)[0].graph
    written = frozenset().union(*(effects_of(node).writes for node in body.nodes))
    places = [node for node in body.nodes if node.op == "placeholder"]
    overwritten = {i for i, node in enumerate(places) if memory_of(value_of(node)) & written}
    if nested:
        outside = memory_of([value_of(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")])
        overwritten = {i for i in overwritten if memory_of(value_of(call.args[1 + i])) & outside}
    return frozenset(overwritten)


def _checkpointed(
    kept: frozenset[int], enters_modes: bool, body: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    options, rest = TagActivationCheckpoint.divide_kwargs(options)
    context = getattr(body, "meta", {}).get("_checkpoint_context_fn")
    if context is not None:
        options["context_fn"] = context
    held = {i: arg for i, arg in enumerate(args) if i in kept or _is_refused(arg)}
    given = [arg for i, arg in enumerate(args) if i not in held]
    run = leaves_as_found(body) if enters_modes else body

    def block(*given: Any, **rest: Any) -> Any:
        others = iter(given)
        return run(*(held[i] if i in held else next(others) for i in range(len(args))), **rest)

    return checkpoint(block, *given, **{**options, "use_reentrant": False}, **rest)


def _is_refused(value: Any) -> bool:
    """Whether autograd refuses to record that it is used: a view that an autograd function gave, whose memory has been
    overwritten since. In torch 2.11 Dynamo's graphs have such a function for a hook, and `checkpoint` records a use of
    its arguments, even where the block does nothing with them that is recorded."""
    try:
        getattr(value, "grad_fn", None)
    except RuntimeError:
        return True
    return False
