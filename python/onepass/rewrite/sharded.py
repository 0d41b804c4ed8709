"""Fused modules that FSDP2 shards: its hooks run as they are, and what stands between them is captured."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from torch import nn

__all__ = ["between_hooks", "is_sharded"]


def is_sharded(model: nn.Module) -> bool:
    """Whether hooks of FSDP2 gather its parameters."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def between_hooks(model: nn.Module, compile: Callable) -> Callable:
    """A module's `forward` captured, its own hooks around it. Dynamo would end the graph at FSDP2's and go on in
    `forward`, of whose code, which all layers share, it keeps eight captures; that of PyTorch's own modules it passes
    over."""
    captured = compile(lambda forward, *inputs, **options: forward(*inputs, **options))

    def call(*inputs, **options):
        if torch.compiler.is_dynamo_compiling():
            return model._call_impl(*inputs, **options)
        forward, own = model.forward, "forward" in model.__dict__
        model.forward = functools.partial(captured, forward)
        try:
            return model._call_impl(*inputs, **options)
        finally:
            if own:
                model.forward = forward
            else:
                del model.forward

    return call
