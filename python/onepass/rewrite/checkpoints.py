"""Checkpointed blocks of a captured graph: graphs of their own, which backward runs again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch._higher_order_ops.wrap import TagActivationCheckpoint, tag_activation_checkpoint
from torch.utils.checkpoint import checkpoint

from onepass.rewrite.effects import bodies

__all__ = ["checkpointed_blocks", "draw_again"]


def checkpointed_blocks(graph: fx.Graph) -> Iterator[fx.GraphModule]:
    """The graphs of a graph's checkpointed blocks; these may have some, too."""
    for node in graph.nodes:
        if node.target is tag_activation_checkpoint:
            yield from bodies(node)


def draw_again(graph: fx.Graph) -> None:
    """Makes checkpointed blocks draw the same random numbers when backward runs them again, as `torch.utils.checkpoint`
    does. The operator that Dynamo captures leaves that to Inductor."""
    for node in graph.nodes:
        if node.target is tag_activation_checkpoint:
            node.target = _checkpointed


def _checkpointed(body: Callable[..., Any], *args: Any, **options: Any) -> Any:
    options, rest = TagActivationCheckpoint.divide_kwargs(options)
    context = getattr(body, "meta", {}).get("_checkpoint_context_fn")
    if context is not None:
        options["context_fn"] = context
    return checkpoint(body, *args, **{**options, "use_reentrant": False}, **rest)
