"""What a graph enters, such as autocast or a level of vmap, is left again however the graph ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx
from torch._C import _functorch as functorch
from torch.autograd import forward_ad
from torch.nn import attention

from onepass.graph.effects import bodies
from onepass.graph.operations import modes

__all__ = ["Modes", "enters", "leaves_as_found"]


def leaves_as_found(call: Callable) -> Callable:
    """What calls a graph that enters something, made to leave it where the graph does not come to its end.

    Dynamo writes the `with` of a program as a node that enters and one that exits, and the latter does not run behind
    an exception. `torch.utils.checkpoint` has one whenever backward has run as much of a block again as it needs.
    Autocast that nobody left would keep casts of weights that an optimizer has changed since.
    """

    @functools.wraps(call)
    def called(*args, **kwargs):
        found = Modes.now()
        try:
            return call(*args, **kwargs)
        except BaseException:
            found.restore()
            raise

    return called


_SET = ("_set_grad_enabled", "_set_fwd_grad_enabled", "_saved_tensors_hooks_disable", "_sdpa_kernel")
"""Functions by which Dynamo enters and leaves what has one setting for the process or the thread."""


def enters(graph: fx.Graph) -> bool:
    """Whether it, or a graph within it, enters anything."""
    return (
        any(entered for _, *entered in modes(graph))
        or any(getattr(node.target, "__name__", "") in _SET for node in graph.nodes)
        or any(enters(body.graph) for node in graph.nodes for body in bodies(node))
    )


@dataclass(frozen=True)
class Modes:
    """What a graph can enter, as it was at one time; levels and autocasts are counts."""

    levels: int
    dual_level: int
    autocasts: int
    casts: tuple[tuple[str, bool, torch.dtype], ...]
    caches_casts: bool
    forward_ad: bool
    grad: bool
    attention: frozenset[attention.SDPBackend]
    attention_order: tuple[int, ...]
    hooks_refused: str | None

    @classmethod
    def now(cls) -> Modes:
        """Those that hold now."""
        return cls(
            levels=functorch.get_dynamic_layer_stack_depth(),
            dual_level=forward_ad._current_level,
            autocasts=_autocasts(),
            casts=tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
            caches_casts=torch.is_autocast_cache_enabled(),
            forward_ad=torch._C._is_fwd_grad_enabled(),
            grad=torch.is_grad_enabled(),
            attention=frozenset(attention._cur_sdpa_kernel_backends()),
            attention_order=tuple(torch._C._get_sdp_priority_order()),
            hooks_refused=torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        )

    def restore(self) -> None:
        """Leaves what was entered since."""
        for _ in range(self.levels, functorch.get_dynamic_layer_stack_depth()):
            _EXITS[functorch.peek_interpreter_stack().key()]()
        while forward_ad._current_level > self.dual_level:
            forward_ad.exit_dual_level()
        for _ in range(self.autocasts, _autocasts()):
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        for device, enabled, dtype in self.casts:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.caches_casts)
        torch._C._set_fwd_grad_enabled(self.forward_ad)
        torch.set_grad_enabled(self.grad)
        attention._sdpa_kernel(list(self.attention))
        torch._C._set_sdp_priority_order(list(self.attention_order))
        if self.hooks_refused is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(self.hooks_refused)


_EXITS = {
    functorch.TransformType.Vmap: functorch._vmap_decrement_nesting,
    functorch.TransformType.Grad: functorch._grad_decrement_nesting,
    functorch.TransformType.Jvp: functorch._jvp_decrement_nesting,
    functorch.TransformType.Functionalize: functorch._func_decrement_nesting,
}


def _autocasts() -> int:
    """How many have been entered and not left. PyTorch tells it where it counts one more."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
