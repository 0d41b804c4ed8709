"""Whole models as they are, compiled, and fused: training steps on CUDA, inference on the CPU."""

from __future__ import annotations

import json as _json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from onepass._markdown import markdown_table
from onepass.bench.timing import clock_for
from onepass.rewrite.fuse import Rewriter

__all__ = ["MODELS", "PROVIDERS", "markdown", "run", "show"]

MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
}


@dataclass(frozen=True)
class Whole:
    """A model of transformers, with random weights, and the shape of its tokens."""

    name: str
    device: str
    tokens: tuple[int, int]
    configuration: str
    options: dict[str, Any]

    @property
    def trains(self) -> bool:
        """Forward, backward, and the gradients of all parameters, under bfloat16 autocast; else inference, float32."""
        return self.device == "cuda"

    def build(self, device: torch.device) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model, and what it is called with.

        Raises:
            ModuleNotFoundError: without transformers.
        """
        import transformers

        torch.manual_seed(0)
        configuration = getattr(transformers, self.configuration)(**self.options)
        of = transformers.AutoModel if self.configuration == "BertConfig" else transformers.AutoModelForCausalLM
        model = of.from_config(configuration, attn_implementation="sdpa").to(device).train(self.trains)
        ids = torch.randint(0, configuration.vocab_size, self.tokens, device=device)
        if self.configuration == "BertConfig":
            return model, {"input_ids": ids}
        return model, {"input_ids": ids, "use_cache": False, **({"labels": ids} if self.trains else {})}


MODELS: tuple[Whole, ...] = (
    Whole("GPT-2 medium", "cuda", (8, 1024), "GPT2Config", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    Whole("Llama 1B", "cuda", (4, 2048), "LlamaConfig", LLAMA),
    Whole("BERT base", "cuda", (32, 512), "BertConfig", {}),
    Whole("MiniLM", "cpu", (8, 128), "BertConfig", MINILM),
    Whole("BERT base", "cpu", (4, 128), "BertConfig", {}),
    Whole("GPT-2", "cpu", (1, 256), "GPT2Config", {}),
)

PROVIDERS: dict[str, Callable[[nn.Module], Callable]] = {
    "eager": lambda model: model,
    "compile": lambda model: torch.compile(model),
    "onepass": lambda model: torch.compile(model, backend=Rewriter()),
    "onepass_inductor": lambda model: torch.compile(model, backend=Rewriter(then="inductor")),
}


def run(
    device: torch.device,
    only: str | None,
    json: Path | None,
    providers: list[str] | None,
    quick: bool,
    console: Console,
) -> dict[str, Any]:
    """Times every model of a device with every provider in turn."""
    import re

    from onepass.bench import facts

    unknown = [name for name in providers or () if name not in PROVIDERS]
    if unknown:
        raise ValueError(f"no provider is called {', '.join(unknown)}; there are {', '.join(PROVIDERS)}")
    chosen = [m for m in MODELS if m.device == device.type and (only is None or re.search(only, m.name))]
    results = facts(device, clock_for(device)) | {"suite": "fuse", "rows": []}
    for model in chosen:
        results["rows"] += measure(model, device, providers or list(PROVIDERS), 3 if quick else 10)
        if json is not None:  # compilers take minutes: what is there is not lost
            Path(json).write_text(_json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    show(results, console)
    return results


def measure(whole: Whole, device: torch.device, providers: list[str], rounds: int) -> list[dict[str, Any]]:
    """A row for each provider: median seconds, peak bytes, and what the result differs from eager's by."""
    model, inputs = whole.build(device)
    steps = {name: _step(whole, model, PROVIDERS[name](model), inputs) for name in providers}
    rows, failed = {}, set()
    for name, step in steps.items():
        torch._dynamo.reset()
        row = rows[name] = {"model": whole.name, "tokens": whole.tokens, "trains": whole.trains, "provider": name}
        try:
            began = time.perf_counter()
            result = step()
            row["first_seconds"] = round(time.perf_counter() - began, 1)
            step(), step()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
                step()
                row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
            row["result"] = result.double().abs().mean().item()
        except Exception as error:  # a compiler may fail in any way, and the others go on
            row["failure"] = f"{type(error).__name__}: {str(error)[:200]}"
            failed.add(name)
    times: dict[str, list[float]] = {name: [] for name in steps if name not in failed}
    for _ in range(rounds):
        for name in times:
            began = time.perf_counter()
            steps[name]()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[name].append(time.perf_counter() - began)
    for name, samples in times.items():
        rows[name]["seconds"] = statistics.median(samples)
    return list(rows.values())


def _step(whole: Whole, model: nn.Module, call: Callable, inputs: dict[str, Tensor]) -> Callable[[], Tensor]:
    """A training step without its optimizer, or inference."""

    def train() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            result = call(**inputs)
            loss = result.loss if "labels" in inputs else result[0].float().square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def infer() -> Tensor:
        return call(**inputs)[0]

    return train if whole.trains else infer


HEAD = ("model", "tokens", "provider", "ms", "eager's time over it", "compile's", "peak GiB")


def table(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row for each model and provider, as text."""
    seconds = {(row["model"], row["provider"]): row.get("seconds") for row in results["rows"]}

    def times(row: dict[str, Any], other: str) -> str:
        mine, its = row.get("seconds"), seconds.get((row["model"], other))
        return f"{its / mine:.2f}" if mine and its else ""

    return [
        (
            row["model"],
            "x".join(map(str, row["tokens"])),
            row["provider"],
            f"{1e3 * row['seconds']:.1f}" if "seconds" in row else row.get("failure", ""),
            times(row, "eager"),
            times(row, "compile"),
            f"{row['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in row else "",
        )
        for row in results["rows"]
    ]


def show(results: dict[str, Any], console: Console) -> None:
    """The table on the console."""
    shown = Table(*HEAD, title=title(results))
    for row in table(results):
        shown.add_row(*row)
    console.print(shown)


def title(results: dict[str, Any]) -> str:
    """What was measured, and where."""
    what = "training step, bfloat16 autocast" if results["device"] == "cuda" else "inference, float32"
    return f"Whole models: {what}; {results['device_name']}, torch {results['torch']}"


def markdown(results: dict[str, Any]) -> str:
    """The table as Markdown, for the README."""
    return "\n".join([f"**{title(results)}**", "", *markdown_table(HEAD, table(results))])
