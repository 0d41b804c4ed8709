"""Split and stack, or one tensor? The same network a feature at a time, for all features at once, and as a line.

A norm, tanh, a linear layer to one number and relu, of 16 inputs of 1024 rows. A feature at a time PyTorch launches two
kernels for each; at once, two for all; a line has what stands before the product, and behind it, in one each or all in
one. Modules are made inside the functions, as published, so that start to finish has that, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onepass.bench.cases import clean, says
from onepass.bench.patterns import Case, Pattern
from onepass.bench.providers import Provider
from onepass.bench.report import OURS
from onepass.call import fused
from onepass.case import explain, timeline
from onepass.case.comparison import Comparison, Study
from onepass.case.report import size_and_dtype
from onepass.pricing.timing import Run, WallClock

__all__ = ["COMPARISON", "VARIANTS", "combined", "line_of_all", "line_of_splits", "split_stack"]

LINE = "layer_norm(0.0) | tanh | linear | bias | relu"


class Given(NamedTuple):
    """Parameters of a linear layer that others compute with, too, so that results can be compared."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def linear_to_one(like: Tensor, input_dim: int, parameters: Given | None) -> nn.Linear | Given:
    """Made here, as published, where no parameters are given."""
    return nn.Linear(input_dim, 1, device=like.device, dtype=like.dtype) if parameters is None else parameters


def split_stack(input_data: Tensor, num_inputs: int, batch_size: int, input_dim: int, parameters=None) -> Tensor:
    """A feature at a time."""
    split_input_data = torch.split(input_data, input_dim * batch_size)
    layer_norm = nn.LayerNorm(input_dim, eps=0.0, elementwise_affine=False, device=input_data.device)
    norm_features = []
    for features in split_input_data:
        norm_features.append(torch.tanh(layer_norm(features.view([batch_size, input_dim]))))
    linear_input = torch.stack(norm_features)
    return F.relu(linear_to_one(input_data, input_dim, parameters)(linear_input))


def combined(input_data: Tensor, num_inputs: int, batch_size: int, input_dim: int, parameters=None) -> Tensor:
    """All features at once: the rows of one tensor."""
    features = input_data.view(num_inputs, batch_size, input_dim)
    layer_norm = nn.LayerNorm(input_dim, eps=0.0, elementwise_affine=False, device=input_data.device)
    linear_input = torch.tanh(layer_norm(features))
    return F.relu(linear_to_one(input_data, input_dim, parameters)(linear_input))


def line_of_splits(input_data: Tensor, num_inputs: int, batch_size: int, input_dim: int, parameters=None) -> Tensor:
    """Our line from the same splits."""
    inputs = [part.view(batch_size, input_dim) for part in torch.split(input_data, input_dim * batch_size)]
    layer = linear_to_one(input_data, input_dim, parameters)
    return fused_stack(inputs, layer.weight, layer.bias)


def line_of_all(input_data: Tensor, num_inputs: int, batch_size: int, input_dim: int, parameters=None) -> Tensor:
    """Our line, all features at once."""
    layer = linear_to_one(input_data, input_dim, parameters)
    return fused(LINE, input_data.view(num_inputs, batch_size, input_dim), layer.weight, layer.bias)


def fused_stack(inputs: list[Tensor], *operands: Tensor) -> Tensor:
    """The line over a list of tensors as if they were stacked."""
    return fused(LINE, inputs, *operands, stack=True)


@dataclass(frozen=True)
class Variant:
    """One of the functions, as it is or compiled; `published`: times as fast as split_stack, on an A100."""

    name: str
    function: Callable[..., Tensor]
    compiled: bool = False
    published: float | None = None

    def build(self, pattern: Pattern) -> Callable[..., Tensor]:
        """Of x and given parameters, to check and to time on the device."""

        def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return self.function(x.flatten(), *x.shape, Given(weight, bias))

        return torch.compile(call, dynamic=False) if self.compiled else call

    def whole(self) -> Callable[..., Tensor]:
        """As published: of flat data and the sizes, with the modules made inside."""
        return torch.compile(self.function, dynamic=False) if self.compiled else self.function


VARIANTS = (
    Variant("split_stack", split_stack, published=1.0),
    Variant("combined", combined, published=8.4),
    Variant("compile_split_stack", split_stack, compiled=True, published=2.5),
    Variant("compile_combined", combined, compiled=True, published=10.3),
    Variant(f"{OURS}_splits", line_of_splits),
    Variant(OURS, line_of_all),
)


def network(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What all of them compute, and whose errors in float64's sight are the measure."""
    return F.relu(F.linear(torch.tanh(F.layer_norm(x, x.shape[-1:], eps=0.0)), weight, bias))


def of_variants(compiled: bool) -> list[Provider]:
    return [Provider(v.name, v.build) for v in VARIANTS if compiled or not v.compiled]


def sizes(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Case, ...]:
    return tuple(Case(shape, dtype, "", 1) for shape in shapes)


TEACHING, PUBLISHED, LARGE = (4, 64, 32), (16, 1024, 256), (16, 16384, 256)  # inputs, batch, features
EVERYWHERE = *sizes(TEACHING, PUBLISHED), *sizes(PUBLISHED, dtype=torch.bfloat16)


@dataclass
class Calls:
    """Forward of the functions as published, and forward with all gradients, of one size."""

    forward: dict[str, Callable[[], object]]
    step: dict[str, Callable[[], object]]


def published(study: Study, case: Case, variants: list[Variant]) -> Calls:
    """Data and upstream gradient are the same for all."""
    generator = torch.Generator(study.device).manual_seed(1)
    data = torch.randn(case.shape, generator=generator, dtype=case.dtype, device=study.device).flatten()
    upstream = torch.ones((*case.shape[:-1], 1), dtype=case.dtype, device=study.device)
    wanted = data.clone().requires_grad_()

    def step(function: Callable[..., Tensor]) -> None:
        wanted.grad = None
        function(wanted, *case.shape).backward(upstream)

    whole = {variant.name: variant.whole() for variant in variants}
    return Calls(
        {name: partial(function, data, *case.shape) for name, function in whole.items()},
        {name: partial(step, function) for name, function in whole.items()},
    )


def modules(device: torch.device, dtype: torch.dtype, input_dim: int) -> object:
    """What each of PyTorch's functions makes before it computes."""
    norm = nn.LayerNorm(input_dim, eps=0.0, elementwise_affine=False, device=device)
    return norm, nn.Linear(input_dim, 1, device=device, dtype=dtype)


def warm(calls: Calls) -> dict[str, str]:
    """Compiles what is compiled at first use; returns what cannot run, and why, and takes it out."""
    failed = {}
    for name in list(calls.forward):
        try:
            for call in (calls.forward[name], calls.step[name]) * 2:
                call()
        except Exception as error:  # a variant may fail in any way, and the others go on
            failed[name] = says(error)
            del calls.forward[name], calls.step[name]
    return failed


def start_to_finish(study: Study, case: Case, calls: Calls) -> list[dict[str, Any]]:
    """A row for each variant: microseconds from the call until the device is done, modules made inside."""
    clock = WallClock(study.device)
    making = {"modules": partial(modules, study.device, case.dtype, case.shape[-1])}
    forward, step = (
        clock.median({name: Run(call) for name, call in (of | making).items()}, study.seconds)
        for of in (calls.forward, calls.step)
    )
    size = {"shape": list(case.shape), "out_features": 1, "layout": "", "dtype": str(case.dtype).removeprefix("torch.")}
    return [
        size
        | {
            "variant": name,
            "published": next((v.published for v in VARIANTS if v.name == name), None),
            "forward_us": round(1e6 * forward[name], 2),
            "step_us": round(1e6 * step[name], 2),
        }
        for name in (*calls.forward, *making)
    ]


def timelines(study: Study, case: Case, calls: Calls) -> dict[str, list[timeline.Lane]]:
    """The lanes of both directions; writes the trace and the picture where they are asked for."""
    named = {
        f"{name}, {direction}": call
        for direction, of in (("forward", calls.forward), ("forward and backward", calls.step))
        for name, call in of.items()
    }
    lanes = timeline.record(named, study.device, study.trace)
    panels = {"forward": lanes[: len(calls.forward)], "forward and backward": lanes[len(calls.forward) :]}
    if study.plot is not None:
        told = f"{explain.size_of(case.shape)} on {study.results['device_name']}, torch {torch.__version__}"
        timeline.draw(panels, list(calls.forward), told, study.plot)
    for file in (study.trace, study.plot):
        if file is not None:
            study.console.print(f"wrote {file}", highlight=False, soft_wrap=True)
    return panels


def further(study: Study) -> list[str]:
    """Start to finish of every size; of the published one the timelines, and what the figures say."""
    variants = [variant for variant in VARIANTS if study.compiled or not variant.compiled]
    cases = [case for _, case in study.cases]
    headline = next((case for case in cases if case.shape == PUBLISHED), cases[0])
    results, failures = study.results, []
    results["start_to_finish"] = []
    for case in cases:
        with clean(study.device), explain.graph_breaks(results):
            calls = published(study, case, variants)
            failed = warm(calls)
            rows = start_to_finish(study, case, calls)
            results["start_to_finish"] += rows
            failures += [f"{size_and_dtype(rows[0])} {name}, as published: {why}" for name, why in failed.items()]
            if case is headline:
                panels = timelines(study, case, calls)
    results["launches"] = {name: {lane.name: lane.as_json() for lane in lanes} for name, lanes in panels.items()}
    explain.show(study, headline, panels)
    return failures


COMPARISON = Comparison(
    name="fuse-or-not",
    title="To fuse or not to fuse: 16 inputs one by one, all at once, and as a line",
    patterns=(Pattern("fuse-or-not", LINE, network, cuda=(*EVERYWHERE, *sizes(LARGE)), cpu=EVERYWHERE),),
    inputs=("x", "linear weight", "linear bias"),
    providers=of_variants,
    judged=tuple(variant.name for variant in VARIANTS if not variant.compiled),
    further=further,
    files=("trace", "plot"),
)
