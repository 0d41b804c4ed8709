"""A program as a script of its own that shows how eager and fused differ."""

from __future__ import annotations

import inspect
import re

from fuzz.program import prelude
from fuzz.program.programs import Program

__all__ = ["reproduction"]

HEAD = """import math
import operator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.rewrite import fuse as fusing
from onepass.rewrite import heads, linear, linears

torch.set_default_dtype(torch.float64)
fusing.gain_of = lambda chain, *_, **__: float(len(chain.nodes))  # whatever a line can say becomes one
fusing.groups_of = lambda graph, *_: [] if fusing.changes_shapes(graph) else fusing.group_norms(graph)
heads.LEAST_LOGITS = 0
linears.LONG_SUM = linear.LARGE = 0
torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags = False  # of a module, in torch 2.11
"""

TAIL = """
def told(value):
    if not isinstance(value, torch.Tensor):
        return value
    numbers = [f"{n:.6g}" for n in value.detach().double().flatten()[:6].tolist()]
    return tuple(value.shape), value.stride(), value.dtype, numbers, f"{value.detach().double().sum().item():.9g}"


CONTEXTS = {
    "training": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def run(way):
    torch.manual_seed(7)
    called, C = way(MADE), 0
    for mode in MODES:
        for T in LENGTHS:
            torch.manual_seed(100)
            arguments = inputs(T, C)
            C += 1
            with CONTEXTS[mode]():
                try:
                    results = tree_leaves(called(*arguments))
                    yield from ((f"{mode} {T}: result {i}", told(r)) for i, r in enumerate(results))
                    tensors = [t for t in (*arguments, *results) if isinstance(t, torch.Tensor)]
                    memory = [t.untyped_storage().data_ptr() for t in tensors]
                    yield f"{mode} {T}: memory", [memory.index(m) for m in memory]
                    wanted = [t for t in tensors if t.requires_grad]
                    total = [(r * torch.linspace(-1, 2, r.numel()).view_as(r)).sum() for r in results
                             if isinstance(r, torch.Tensor) and r.requires_grad]
                    if mode in ("training", "autocast") and total:
                        gradients = torch.autograd.grad(sum(total), wanted, allow_unused=True, create_graph=True)
                        yield from ((f"{mode} {T}: gradient {i}", told(g)) for i, g in enumerate(gradients))
                except Exception as error:
                    yield f"{mode} {T}: raises", f"{type(error).__name__}: {str(error)[:400]}"
            yield from ((f"{mode} {T}: input {i}", told(t)) for i, t in enumerate(arguments))
            STATE


eager, fused = dict(run(lambda made: made)), dict(run(onepass.fuse))
for what in eager.keys() | fused.keys():
    if eager.get(what) != fused.get(what):
        print(what, "eager", eager.get(what), "fused", fused.get(what), sep="\\n    ")
"""
STATE = 'yield from ((f"{mode} {T}: state {n}", told(t)) for n, t in called.state_dict().items())'


PRELUDE = re.findall(r"^(?:def|class) (\w+)", inspect.getsource(prelude), re.MULTILINE)


def reproduction(program: Program, why: str) -> str:
    """The script."""
    text = program.source + program.input_source
    pieces = [inspect.getsource(prelude.R)]
    for name in PRELUDE:
        if re.search(rf"\b{name}\b", text):
            pieces.append(_source_of(name))
    tail = TAIL.replace("MADE", "Program()" if program.state else "program")
    tail = tail.replace("MODES", repr(program.modes))
    tail = tail.replace("LENGTHS", repr(program.lengths if len(program.lengths) > 1 else program.lengths * 2))
    tail = tail.replace("            STATE\n", f"            {STATE}\n" if program.state else "")
    comment = "\n".join(f"# {line}" for line in why.splitlines())
    return "\n\n".join([comment, HEAD, *pieces, program.source, program.input_source, tail])


def _source_of(name: str) -> str:
    """Of a function or class in the prelude, and all that is registered for it."""
    source = inspect.getsource(prelude)
    parts = re.split(r"\n\n\n", source)
    return "\n\n\n".join(part for part in parts if re.search(rf"(def|class) {name}\b|^@{name}\b", part))
