"""Who is timed: onepass, eager PyTorch, torch.compile, and other libraries where they are installed."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onepass.bench.patterns import P, Pattern

__all__ = ["PROVIDERS", "Provider", "Trial"]


@dataclass(frozen=True)
class Provider:
    """How to get the function that runs a pattern; None for a pattern that it does not offer."""

    name: str
    build: Callable[[Pattern], Callable | None]
    module: str = "torch"
    distribution: str = "torch"
    cuda_only: bool = False
    default: bool = True
    keep_probability: float = 1 - P
    overwrites: tuple[str, ...] = ()  # patterns whose backward writes into what it was given
    forward_only: tuple[str, ...] = ()

    def version(self) -> str:
        """Imports the library.

        Raises:
            ImportError: and whatever else a library raises that cannot be used here.
        """
        module = importlib.import_module(self.module)
        return getattr(module, "__version__", None) or importlib.metadata.version(self.distribution)


class Trial:
    """A pattern's function on its tensors: forward builds the graph, backward runs it from a fixed gradient."""

    def __init__(self, provider: Provider, pattern: Pattern, function: Callable, inputs: list[Tensor], upstream):
        self.function = function
        self.overwrites = pattern.name in provider.overwrites
        self.forward_only = pattern.name in provider.forward_only
        self.given, self.given_upstream = inputs, upstream
        self.inputs, self.upstream = inputs, upstream
        if self.overwrites:
            self.inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
            self.upstream = [g.clone() for g in upstream]
        if self.forward_only:  # quack's takes float32 columns
            self.inputs = [t.detach().float() if t.dim() == 1 else t.detach() for t in self.inputs]
        self.wanted = [t for t in self.inputs if t.requires_grad]
        self.outputs: tuple[Tensor, ...] = ()

    def forward(self) -> tuple[Tensor, ...]:
        """A training forward: inputs require gradients, and the graph is built."""
        results = self.function(*self.inputs)
        return results if isinstance(results, tuple) else (results,)

    def backward(self) -> tuple[Tensor, ...]:
        """All gradients; needs a `refresh` before the first, and before every one where backward overwrites."""
        return torch.autograd.grad(self.outputs, self.wanted, self.upstream, retain_graph=True)

    def refresh(self) -> None:
        """A graph to differentiate, on tensors as they were given."""
        if self.overwrites:
            with torch.no_grad():
                for own, given in zip((*self.inputs, *self.upstream), (*self.given, *self.given_upstream)):
                    own.copy_(given)
        self.outputs = self.forward()


def eager(pattern: Pattern) -> Callable:
    return pattern.eager


def compiled(pattern: Pattern) -> Callable:
    return torch.compile(pattern.eager, dynamic=False)


def compiled_with_autotuning(pattern: Pattern) -> Callable:
    return torch.compile(pattern.eager, dynamic=False, mode="max-autotune-no-cudagraphs")


def onepass(pattern: Pattern) -> Callable:
    return pattern.fused


def liger(pattern: Pattern) -> Callable | None:
    from liger_kernel import ops

    # rms_norm's last argument: not to write its gradient over the one that it is given, which the next round needs.
    functions = {
        "layer_norm": lambda x, w, b: ops.LigerLayerNormFunction.apply(x, w, b, 1e-5),
        "rms_norm": lambda x, w: ops.LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False),
        "swiglu": lambda g, u: ops.LigerSiLUMulFunction.apply(g, u),
        "softmax": lambda x: ops.LigerSoftmaxFunction.apply(x),
    }
    if hasattr(ops, "LigerFusedAddRMSNormFunction"):
        functions["add_rms_norm"] = lambda x, r, w: ops.LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6)
    return functions.get(pattern.name)


def quack(pattern: Pattern) -> Callable | None:
    from quack import rmsnorm, softmax
    from quack.rmsnorm import layernorm_fwd

    functions = {
        "layer_norm": lambda x, w, b: layernorm_fwd(x, w, b, 1e-5),
        "rms_norm": lambda x, w: rmsnorm(x, w, eps=1e-6),
        "add_rms_norm": lambda x, r, w: rmsnorm(x, w, residual=r, eps=1e-6, prenorm=True),
        "softmax": softmax,
    }
    return functions.get(pattern.name)


KEPT = (
    1 - round(P * 2**16) / 2**16
)  # onepass rounds a dropout's p to a multiple of 2^-16 and divides by what that keeps
PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("eager", eager),
        Provider("compile", compiled),
        Provider("compile_max", compiled_with_autotuning, default=False),
        Provider("liger", liger, "liger_kernel.ops", "liger-kernel", cuda_only=True, overwrites=("swiglu",)),
        Provider("quack", quack, "quack", "quack-kernels", cuda_only=True, forward_only=("layer_norm",)),
        Provider("onepass", onepass, "onepass", "onepass", keep_probability=KEPT),
    )
}
