"""Who is timed: onepass, eager PyTorch, torch.compile, and other libraries where they are installed."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepass.bench.attention import CAP, SCALE, Attention
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
    suites: tuple[str, ...] = ()  # where it is, if not everywhere
    keep_probability: float = 1 - P
    overwrites: tuple[str, ...] = ()  # patterns whose backward writes into what it was given
    forward_only: tuple[str, ...] = ()

    def is_default(self, suite: str) -> bool:
        """Whether it runs without being named."""
        return self.default and (not self.suites or suite in self.suites)

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
        has_no_backward = pattern.name in provider.forward_only
        self.forward_only = pattern.forward_only or has_no_backward
        self.given, self.given_upstream = inputs, upstream
        self.inputs, self.upstream = inputs, upstream
        if self.overwrites:
            self.inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
            self.upstream = [g.clone() for g in upstream]
        if has_no_backward:  # quack's takes float32 columns
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


def compiled(pattern: Pattern, mode: str | None = None) -> Callable | None:
    """Not whole models, which take minutes."""
    return None if pattern.suite == "models" else torch.compile(pattern.eager, dynamic=False, mode=mode)


def onepass(pattern: Pattern) -> Callable:
    return pattern.fused


def onepass_line(pattern: Pattern) -> Callable | None:
    """The line itself, where `onepass` may choose one of PyTorch's engines."""
    return super(Attention, pattern).fused if sdpa(pattern) else None


def sdpa(pattern: Pattern, engine: SDPBackend | None = None) -> Callable | None:
    """PyTorch's own function, by its own choice or by one engine, which raises where it does not serve."""
    call = pattern.through(F.scaled_dot_product_attention) if isinstance(pattern, Attention) else None
    if call is None or engine is None:
        return call

    def by_engine(*inputs: Tensor) -> Tensor:
        with sdpa_kernel(engine):
            return call(*inputs)

    return by_engine


def flex(pattern: Pattern) -> Callable | None:
    """Which blocks a mask leaves is found at its first call: a model does it once for all its layers."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not isinstance(pattern, Attention) or not pattern.parsed.values or pattern.has("dropout"):
        return None
    run = torch.compile(flex_attention, dynamic=False)

    @functools.cache
    def options(mask: Tensor | None, sizes: tuple[int, ...], device: torch.device) -> dict:
        if pattern.has("causal"):
            return {"block_mask": create_block_mask(lambda b, h, i, j: i >= j, None, None, *sizes[2:], device=device)}
        if pattern.has("tanh"):
            return {"score_mod": lambda score, b, h, i, j: CAP * torch.tanh(score / CAP)}
        if mask is None:
            return {}
        whole = mask.expand(sizes)
        if mask.dtype != torch.bool:
            return {"score_mod": lambda score, b, h, i, j: score + whole[b, h, i, j]}
        batches = [n if n > 1 else None for n in mask.shape[:2]]
        blocks = create_block_mask(lambda b, h, i, j: whole[b, h, i, j], *batches, *sizes[2:], device=device)
        return {"block_mask": blocks}

    def call(query: Tensor, key: Tensor, *others: Tensor) -> Tensor:
        mask, value = others if len(others) == 2 else (None, *others)
        sizes = (*query.shape[:-1], key.shape[-2])
        return run(query, key, value, scale=SCALE, **options(mask, sizes, query.device))

    return call


def liger(pattern: Pattern) -> Callable | None:
    from liger_kernel import ops

    # rms_norm's last argument: not to write its gradient over the one that it is given, which the next round needs.
    functions = {
        "layer_norm": lambda x, w, b: ops.LigerLayerNormFunction.apply(x, w, b, 1e-5),
        "rms_norm": lambda x, w: ops.LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False),
        "swiglu": lambda g, u: ops.LigerSiLUMulFunction.apply(g, u),
        "softmax": lambda x: ops.LigerSoftmaxFunction.apply(x),
        "cross_entropy": lambda x, y: ops.LigerCrossEntropyFunction.apply(x, y, None, -100, 0.0, 0.0, "none")[
            0
        ].float(),
    }
    if hasattr(ops, "LigerFusedAddRMSNormFunction"):
        functions["add_rms_norm"] = lambda x, r, w: ops.LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6)
    return functions.get(pattern.name)


def quack(pattern: Pattern) -> Callable | None:
    from quack import cross_entropy, rmsnorm, softmax
    from quack.rmsnorm import layernorm_fwd

    functions = {
        "layer_norm": lambda x, w, b: layernorm_fwd(x, w, b, 1e-5),
        "rms_norm": lambda x, w: rmsnorm(x, w, eps=1e-6),
        "add_rms_norm": lambda x, r, w: rmsnorm(x, w, residual=r, eps=1e-6, prenorm=True),
        "softmax": softmax,
        "cross_entropy": lambda x, target: cross_entropy(x, target, reduction="none"),
    }
    return functions.get(pattern.name)


KEPT = (
    1 - round(P * 2**16) / 2**16
)  # onepass rounds a dropout's p to a multiple of 2^-16 and divides by what that keeps
OF_ROWS = ("table", "curve", "awkward", "layouts", "small", "linear", "programs", "programs_curve", "host")
PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("eager", eager),
        Provider("compile", compiled),
        Provider("compile_max", functools.partial(compiled, mode="max-autotune-no-cudagraphs"), default=False),
        Provider(
            "liger",
            liger,
            "liger_kernel.ops",
            "liger-kernel",
            cuda_only=True,
            suites=OF_ROWS,
            overwrites=("swiglu", "cross_entropy"),
        ),
        Provider(
            "quack", quack, "quack", "quack-kernels", cuda_only=True, suites=OF_ROWS, forward_only=("layer_norm",)
        ),
        Provider("sdpa", sdpa, suites=("attention",)),
        *(
            Provider(f"sdpa_{name}", functools.partial(sdpa, engine=engine), cuda_only=True, suites=("attention",))
            for name, engine in (
                ("cudnn", SDPBackend.CUDNN_ATTENTION),
                ("flash", SDPBackend.FLASH_ATTENTION),
                ("efficient", SDPBackend.EFFICIENT_ATTENTION),
            )
        ),
        Provider("flex", flex, cuda_only=True, suites=("attention",)),
        Provider("onepass_line", onepass_line, "onepass", "onepass", default=False, keep_probability=KEPT),
        Provider("onepass", onepass, "onepass", "onepass", keep_probability=KEPT),
    )
}
