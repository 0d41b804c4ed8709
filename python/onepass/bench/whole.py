"""Whole models as they are, compiled, and fused: training steps on CUDA, inference on the CPU."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from onepass.advice.explain import explain
from onepass.advice.report import Explanation
from onepass.bench import report
from onepass.bench.accuracy import WrongResult
from onepass.bench.machine import facts
from onepass.bench.whole_models import MODELS, ROOM, Whole
from onepass.pricing.timing import clock_for
from onepass.rewrite.fuse import Rewriter, called

__all__ = ["PROVIDERS", "WITH_HEAD", "alike", "markdown", "run", "show"]


def reduce_overhead() -> Callable[..., Any]:
    """What torch.compile takes for `mode="reduce-overhead"`, which is no name of a backend."""
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    return functools.partial(compile_fx, config_patches=list_mode_options("reduce-overhead"))


PROVIDERS: dict[str, Callable[[], Any]] = {
    "eager": lambda: None,
    "compile": lambda: "inductor",
    "onepass": Rewriter,
    "onepass_inductor": lambda: Rewriter(then="inductor"),
    "liger": lambda: None,
    "compile_reduce_overhead": reduce_overhead,
    "onepass_reduce_overhead": lambda: Rewriter(mode="reduce-overhead"),
    "onepass_inductor_reduce_overhead": lambda: Rewriter(then="inductor", mode="reduce-overhead"),
    "eager_cuda_graph": lambda: None,
    "onepass_cuda_graph": Rewriter,
}
"""What makes a backend of torch.compile. Liger has models of its own, and is for those with a head. The last five are
CUDA graphs, torch.compile's and `torch.cuda.graph`'s."""
CAPTURED = frozenset({"eager_cuda_graph", "onepass_cuda_graph"})
RECORDED = frozenset(name for name in PROVIDERS if name.endswith("reduce_overhead"))
WITH_GRAPHS = CAPTURED | RECORDED
SUITES = {"fuse": "Whole models", "fuse_small": "Small models"}

TOLERANCE = 1e-5
"""Largest relative difference from eager's result in inference, in float32: rounding makes 1e-6, GELU by tanh 4e-5."""
RATIO = 1.5
"""Largest distance of a training step from the same step in float32, over eager's distance. Both round to bfloat16 on
the way, each elsewhere; a bias left out of one of BERT's twelve layers makes gradients four times as wrong."""
LOSS_TOLERANCE = 1e-3
"""Of a loss, which is one number: eager's may be right by chance. One of 16 bits may be two units off."""
PRODUCT = re.compile(
    r"gemm|nvjet|cutlass|xmma|cudnn|flash|fmha|attention|wgrad|dgrad|convol|cublas|splitK", re.IGNORECASE
)
"""Kernels of products, convolutions and attention, by their names."""
STEPS = {"cpu": 1, "cuda": 5}
"""That are timed at once, or as many as take SAMPLE_SECONDS and a cache has room for."""
SAMPLE_SECONDS = 0.05
METHOD = {
    "cpu": "the host's clock around each call, around several where one is short, providers in turn, median",
    "cuda": f"the host's clock around {STEPS['cuda']} steps or more one behind the other and a wait for the device, "
    "providers in turn, median; products: their kernels in one step of eager's",
}
DIFFERENCES = ("difference", "gradient_difference")
WITH_HEAD = frozenset(whole.name for whole in MODELS if whole.head)
"""Models whose step is that of a loss, in other dtypes than the others' (`Whole.mode`)."""


def run(
    device: torch.device,
    only: str | None,
    json: Path | None,
    providers: list[str] | None,
    quick: bool,
    console: Console,
    models: Sequence[Whole] = MODELS,
    suite: str = "fuse",
) -> dict[str, Any]:
    """Times every model of a device with every provider in turn; with CUDA graphs those of "fuse_small", or who asks.

    Raises:
        ValueError: for a provider or a model that there is not.
    """
    check_providers(providers, PROVIDERS)
    chosen = models_of(device, only, models)
    graphs = suite == "fuse_small" and device.type == "cuda"
    providers = providers or [name for name in PROVIDERS if graphs or name not in WITH_GRAPHS]
    about = {"suite": suite, "method": METHOD[device.type], "transformers": version_of("transformers")}
    results = facts(device, clock_for(device)) | about | {"rows": []}
    for whole in chosen:
        results["rows"] += measure(whole, device, providers, 3 if quick else 8)
        report.write(results, json)
    show(results, console)
    return results


def version_of(package: str) -> str:
    """Of one that may not be installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "not installed"


def models_of(device: torch.device, only: str | None, models: Sequence[Whole]) -> list[Whole]:
    """Those of a device that a regular expression matches.

    Raises:
        ValueError: where none is.
    """
    there = [whole for whole in models if whole.device == device.type]
    chosen = [whole for whole in there if only is None or re.search(only, whole.name)]
    if not chosen:
        raise ValueError(f"no model matches {only!r}; there are {', '.join(whole.name for whole in there)}")
    return chosen


def check_providers(names: Iterable[str] | None, known: Iterable[str]) -> None:
    """Raises ValueError for one that is not known."""
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"no provider is called {', '.join(unknown)}; there are {', '.join(known)}")


# Each provider captures once or twice; one that gave up at the usual limit of 8 would be timed as eager.
@torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True)
def measure(whole: Whole, device: torch.device, providers: list[str], rounds: int) -> list[dict[str, Any]]:
    """A row for each provider; what fails says so in its row, and the others go on."""
    torch._dynamo.reset()
    gc.collect()  # the model before
    row = {"model": whole.name, "shape": whole.shape, "trains": whole.trains, "dtype": f"{whole.dtype}"[6:]}
    rows = [row | {"provider": name} for name in providers]
    try:
        model, inputs = whole.build(device)
        runs = [Run(whole, model, inputs, row) for row in rows if row["provider"] != "liger" or has_liger(whole, model)]
        explained = priced(whole, model, inputs) if any(run.report for run in runs) else None
        expected, allowed = expected_of(whole, model, inputs)
    except Exception as error:
        return [row | {"failure": said(error)} for row in rows]
    for one in runs:
        if one.row["provider"] == "liger":
            one.measure_liger(device, expected, allowed, rounds)
    rows = [one.row for one in runs]
    runs = [one for one in runs if one.row["provider"] != "liger"]
    for one in runs:
        if one.row["provider"] != "compile":  # nothing of ours, and another minute where dropout is compared without
            one.attempt(one.compare, expected, allowed)
    del expected  # or it would count as memory of the step
    recorded_alone = sum(name in RECORDED for name in providers) == 1  # others' graphs lie in the same memory
    for one in runs:
        one.attempt(one.prepare, device, explained, recorded_alone)
    for _ in range(rounds):
        for one in runs:
            one.attempt(one.time, device)
    for one in runs:
        if one.row["provider"] == "eager" and device.type == "cuda":
            one.attempt(one.profile)
    return rows


def has_liger(whole: Whole, model: nn.Module) -> bool:
    """Whether Liger is installed and has this model."""
    kinds = liger_kinds() if whole.head else {}
    return getattr(getattr(model, "config", None), "model_type", "") in kinds


def liger_kinds() -> dict[str, Any]:
    """Its kinds of models; none where it is not installed."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError:
        return {}
    return MODEL_TYPE_TO_APPLY_LIGER_FN


class Run:
    """A model with one provider, and its row: how far its result is off, seconds, bytes."""

    def __init__(self, whole: Whole, model: nn.Module, inputs: dict[str, Any], row: dict[str, Any]) -> None:
        self.whole, self.model, self.inputs, self.row = whole, model, inputs, row
        backend = PROVIDERS[row["provider"]]()
        step = whole.step(model)
        self.call = step if backend is None else torch.compile(called(step), backend=backend)
        self.report = backend.report if isinstance(backend, Rewriter) else None
        if row["provider"] in CAPTURED:
            self.call = captured(self.call, lambda: whole.begin(inputs))
        self.samples: list[float] = []

    def measure_liger(
        self, device: torch.device, expected: list[list[Tensor]], allowed: list[float], rounds: int
    ) -> None:
        """All of it at once, before the others: Liger puts its functions into modules that they run, too."""
        with left_as_found("transformers", "torch.nn.functional"):
            self.attempt(self.take_liger, device)
            self.attempt(self.compare, expected, allowed)
            self.attempt(self.prepare, device, None, False)
            for _ in range(rounds):
                self.attempt(self.time, device)
        del self.model, self.call

    def take_liger(self, device: torch.device) -> None:
        """The same model once more, in Liger's kernels."""
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        self.model, _ = self.whole.build(device)
        _apply_liger_kernel_to_instance(model=self.model)
        self.call = self.whole.step(self.model)

    def attempt(self, part: Callable, *arguments: Any) -> None:
        """Unless something has failed before: a compiler may fail in any way."""
        if "failure" in self.row:
            return
        try:
            part(*arguments)
        except Exception as error:
            self.row["failure"] = said(error)
            self.model.zero_grad(set_to_none=True)

    def compare(self, expected: list[list[Tensor]], allowed: list[float]) -> None:
        """The result, and all gradients as one vector, with what they are to be."""
        began = time.perf_counter()
        found = outcome(self.whole, self.model, self.call, self.inputs)
        self.row["first_seconds"] = round(time.perf_counter() - began, 1)
        for _ in range(2 if self.row["provider"] in RECORDED else 0):  # the second call records, the third replays
            del found
            found = outcome(self.whole, self.model, self.call, self.inputs)
        for name, ours, theirs, most in zip(DIFFERENCES, found, expected, allowed):
            off = distance(ours, theirs)
            self.row[name] = off if math.isfinite(off) else None
            if not off <= most:
                raise WrongResult(f"{name} is {off:.1e}, more than {most:.1e}")

    def prepare(self, device: torch.device, explained: Explanation | None, recorded_alone: bool) -> None:
        """Compiles what is timed, counts its bytes, and finds how much memory it takes. What Inductor fuses on its own
        is not counted: nothing says what that is; nor is memory of CUDA graphs that has others', too."""
        before = len(self.report.graphs) if self.report else 0
        self.model.train(self.whole.trains)
        self.whole.begin(self.inputs)
        self.row.setdefault("first_seconds", round(self.seconds(device, 1), 1))
        self.seconds(device, 2)
        self.steps = max(STEPS[device.type], min(math.ceil(SAMPLE_SECONDS / self.seconds(device, 1)), ROOM // 2))
        if self.report and explained:
            timed = self.report.graphs[before:] or self.report.graphs
            gained = sum(fused.bytes[0] - fused.bytes[1] for graph in timed for fused in graph)
            self.row["bytes"] = [explained.bytes[0], explained.bytes[0] - gained]
            elementwise, in_lines = explained.elementwise
            self.row["in_lines"] = round(in_lines / elementwise, 3) if elementwise else 0.0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
            self.step()
            peak = torch.cuda.max_memory_allocated(device)
            recorded = self.row["provider"] in RECORDED
            peak += bytes_of_graphs() if recorded else 0
            if recorded_alone or not recorded:
                self.row |= {"peak_bytes": peak, "step_bytes": peak - held}

    def profile(self) -> None:
        """The time of the products, convolutions and attention of a step, alone: what no line makes shorter."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            self.step()
            torch.cuda.synchronize()
        kernels = ((each.key, each.self_device_time_total) for each in found.key_averages())
        self.row["products_seconds"] = 1e-6 * sum(us for name, us in kernels if PRODUCT.search(name))

    def time(self, device: torch.device) -> None:
        """One more sample: on CUDA of steps one behind the other, as they are in training, where the host is ahead."""
        self.whole.begin(self.inputs)
        self.samples.append(self.seconds(device, self.steps) / self.steps)
        self.row["seconds"] = statistics.median(self.samples)

    def seconds(self, device: torch.device, steps: int) -> float:
        """Of so many steps, until the device is done with them."""
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    def step(self) -> None:
        """A training step without its optimizer, or inference."""
        once(self.whole, self.call, self.inputs)
        self.model.zero_grad(set_to_none=True)


def bytes_of_graphs() -> int:
    """Of the memory that CUDA graphs keep for themselves: replays allocate nothing."""
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0))


def captured(call: Callable, begin: Callable[[], None]) -> Callable:
    """One CUDA graph of a call, in inference, whose tensors are the same each time. `begin` takes back what calls left:
    some are made before the graph is there."""
    made: list[Any] = []

    def replayed(**inputs: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("a step that makes gradients is not captured")
        if not made:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    call(**inputs)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = call(**inputs)
            made.extend((graph, result))
            begin()
        made[0].replay()
        return made[1]

    return replayed


@contextlib.contextmanager
def left_as_found(*packages: str) -> Iterator[None]:
    """Puts back, in modules that are loaded, what the names in them stand for."""
    inner = tuple(f"{package}." for package in packages)
    loaded = [m for name, m in sys.modules.items() if m is not None and (name in packages or name.startswith(inner))]
    found = [(module, dict(vars(module))) for module in loaded]
    try:
        yield
    finally:
        for module, before in found:
            for name, value in before.items():
                if vars(module).get(name) is not value:
                    setattr(module, name, value)


def said(error: Exception) -> str:
    """What a row has room for, as one line: what a backend of torch.compile has raised stands in the second."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


Mode = contextlib.AbstractContextManager


def once(whole: Whole, call: Callable, inputs: dict[str, Any], within: Mode | None = None) -> Tensor:
    """Logits, hidden states, or the loss of a model with a head; gradients are left in the parameters.
    Within: for another mode than the model's own."""
    with within or whole.mode():
        result = call(**inputs)
        if whole.head:
            result.backward()
            return result.detach()
        states = result if isinstance(result, Tensor) else result.logits if "labels" in inputs else result[0]
        if not whole.trains:
            return states
        # Not the mean square, of which a norm's result has as good as no gradient.
        loss = result.loss if "labels" in inputs else states.float().exp().mean()
    loss.backward()
    return states.detach()


def outcome(
    whole: Whole, model: nn.Module, call: Callable, inputs: dict[str, Any], within: Mode | None = None
) -> list[list[Tensor]]:
    """The result, and all parameters' gradients; without dropout, whose random numbers are each provider's own."""
    draws = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    model.train(whole.trains and not draws)
    whole.begin(inputs)
    found = [[once(whole, call, inputs, within)]]
    if whole.trains:
        found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return found


def exact_outcome(whole: Whole, model: nn.Module, inputs: dict[str, Any]) -> list[list[Tensor]]:
    """What a step is to give: in float32, and nothing else where the model infers."""
    exact, of = whole.exact(model, inputs)
    return outcome(whole, exact, whole.step(exact), of, contextlib.nullcontext() if whole.trains else None)


def expected_of(whole: Whole, model: nn.Module, inputs: dict[str, Any]) -> tuple[list[list[Tensor]], list[float]]:
    """What a step is to give, and how far from that a result, and all gradients, may be."""
    expected = exact_outcome(whole, model, inputs)
    if not whole.rounds:
        return expected, [TOLERANCE] * len(expected)
    eager = outcome(whole, model, whole.step(model), inputs)
    allowed = [RATIO * distance(*each) for each in zip(eager, expected)]
    if whole.head:
        (loss,) = eager[0]
        unit = distance([loss.nextafter(torch.full_like(loss, math.inf))], [loss])
        allowed[0] = max(allowed[0], LOSS_TOLERANCE, 2 * unit)
    return expected, allowed


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Relative L2 difference, of all tensors as one vector."""
    off = sum(_square(a.float() - b.float()) for a, b in zip(ours, theirs, strict=True))
    return math.sqrt(off / sum(map(_square, theirs)))


def _square(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item() ** 2


def priced(whole: Whole, model: nn.Module, inputs: dict[str, Any]) -> Explanation:
    """What all that is not compute-bound moves in plain PyTorch, forward and backward, and what of it lines do."""
    with whole.mode():
        return explain(whole.step(model), **inputs, device=next(model.parameters()).device)


HEAD = (
    *("model", "shape", "provider", "ms", "over products", "eager's time over it", "compile's", "peak GiB", "first s"),
    *("memory-bound MB", "in lines", "off: result, gradients"),
)


def table(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row for each model and provider, as text."""
    seconds = {(row["model"], row["provider"]): row.get("seconds") for row in results["rows"]}
    products = {row["model"]: row["products_seconds"] for row in results["rows"] if "products_seconds" in row}

    def times(row: dict[str, Any], other: str) -> str:
        mine, its = row.get("seconds"), seconds.get((row["model"], other))
        return f"{its / mine:.2f}" if mine and its else ""

    return [
        (
            row["model"],
            "x".join(map(str, row["shape"])),
            row["provider"],
            row.get("failure") or f"{1e3 * row['seconds']:.1f}",
            f"{row['seconds'] / products[row['model']]:.2f}" if "seconds" in row and row["model"] in products else "",
            times(row, "eager"),
            times(row, "compile"),
            memory(row),
            f"{row['first_seconds']:.1f}" if "first_seconds" in row else "",
            moved(*row["bytes"]) if "bytes" in row else "",
            f"{100 * row['in_lines']:.0f} %" if row.get("in_lines") else "",
            ", ".join(f"{row[name]:.0e}" for name in DIFFERENCES if row.get(name) is not None),
        )
        for row in results["rows"]
    ]


def memory(row: dict[str, Any]) -> str:
    """The peak, and behind it what of it is not weights, where that was measured."""
    if "peak_bytes" not in row:
        return ""
    above = f" ({row['step_bytes'] / 2**30:.2f} above)" if "step_bytes" in row else ""
    return f"{row['peak_bytes'] / 2**30:.2f}{above}"


def moved(before: float, after: float) -> str:
    """Megabytes, and the change as a share of all."""
    share = f" ({100 * (after / before - 1):+.0f} %)" if before else ""
    return f"{before / 1e6:,.0f} → {after / 1e6:,.0f}{share}"


def show(results: dict[str, Any], console: Console) -> None:
    """The tables on the console."""
    for name, found in alike([results]).items():
        shown = Table(*HEAD, title=name)
        for row in table(found):
            shown.add_row(*row)
        console.print(shown)


def title(results: dict[str, Any], row: dict[str, Any]) -> str:
    """What was measured, and where."""
    head, dtype = row["model"] in WITH_HEAD, row.get("dtype", "float32")
    if row["trains"]:
        kind = "weights in bfloat16" if head else "weights in float32, bfloat16 autocast"
        what = f"training step, {kind}, distance from the step in float32"
    else:
        what = f"inference, {dtype}, distance from {'eager' if dtype == 'float32' else 'float32'}'s result"
    models = SUITES[results.get("suite", "fuse")] + (" with their losses" if head else "")
    models += ", as CUDA graphs, too" if has_graphs(results) else ""
    versions = f"torch {results['torch']}"
    if "transformers" in results:
        versions += f", transformers {results['transformers']}"
    return f"{models}: {what}; {results['device_name']}, {versions}"


def has_graphs(results: dict[str, Any]) -> bool:
    """Whether torch.compile's CUDA graphs were measured beside the others."""
    return any(row["provider"] in RECORDED for row in results["rows"])


def alike(runs: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Results by their titles: what was measured alike, if not in one run, is one. Losses come last."""
    found: dict[str, dict[str, Any]] = {}
    for results in runs:
        for row in sorted(results["rows"], key=lambda row: row["model"] in WITH_HEAD):
            found.setdefault(title(results, row), results | {"rows": []})["rows"].append(row)
    return found


def markdown(runs: Iterable[dict[str, Any]]) -> list[str]:
    """Tables as Markdown, for docs/results.md."""
    return [
        "\n".join([f"**{name}**", "", *report.markdown_table(HEAD, table(results))])
        for name, results in alike(runs).items()
    ]
