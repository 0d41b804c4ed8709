"""What works on this machine, and what to do about what does not."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch

from onepass import _native, cache
from onepass._metadata import VERSION
from onepass.call import fused

__all__ = ["Finding", "findings", "to_json"]

LEAST_CAPABILITY = (8, 0)
LEAST_ROOM = 2**28
"""Bytes for the cache, about a thousand kernels."""
RARE_LINE = "abs | softsign | abs | neg"
"""Not in the CPU's table: it is compiled here, or was."""
OPTIONAL = ("matplotlib", "transformers", "accelerate", "trl")
"""What some commands and guides need, and the extra that brings it."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        state: "works"; "missing": something is slower, or cannot be done, without it; "fails": lines give errors.
        said: what there is.
        advice: what to do, where it does not work.
    """

    name: str
    state: str
    said: str
    advice: str = ""


def findings() -> Iterator[Finding]:
    """Looks at everything, one after the other. A compiler may run for some seconds."""
    native = _native.info()
    yield Finding("onepass", "works", f"{VERSION}, {_native.PACKAGE}")
    yield Finding("torch", "works", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    yield Finding("SIMD target", "works", native["simd_target"])
    yield checked("CPU kernels", on_cpu, "rebuild the library: `make` in a checkout, or install the wheel again")
    yield compiler(native["compiler"])
    yield autograd_function()
    yield cache_folder(Path(native["cache_directory"]))
    if prebuilt := len([*Path(native["prebuilt_directory"]).glob("*.cubin")]):
        yield Finding("prebuilt kernels", "works", f"{prebuilt} CUDA kernels in {native['prebuilt_directory']}")
    yield nvrtc()
    yield from gpus()
    for package in OPTIONAL:
        there = importlib.util.find_spec(package) is not None
        advice = "" if there else f"if you want it: pip install {package}"
        yield Finding(package, "works" if there else "missing", "installed" if there else "not installed", advice)


def to_json(found: list[Finding]) -> str:
    """A list of objects with the fields of Finding."""
    return json.dumps([asdict(finding) for finding in found], indent=1)


def checked(name: str, run: Callable[[], str], advice: str) -> Finding:
    """What `run` says, or what it raises."""
    try:
        return Finding(name, "works", run())
    except Exception as error:
        return Finding(name, "fails", f"{type(error).__name__}: {first_line(error)}", advice)


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def right(device: torch.device) -> str:
    """Runs a line forward and backward on a device, beside PyTorch.

    Raises:
        RuntimeError: where the two differ.
    """
    x, b = torch.randn(64, 256, device=device, requires_grad=True), torch.randn(256, device=device)
    upstream = torch.randn(64, 256, device=device)
    ours, theirs = fused("bias | gelu", x, b), torch.nn.functional.gelu(x + b)
    pairs = [(ours, theirs), [torch.autograd.grad(y, x, upstream)[0] for y in (ours, theirs)]]
    if not all(torch.allclose(mine, its, atol=1e-4) for mine, its in pairs):
        raise RuntimeError("a line's result or gradient is not PyTorch's")
    return "a line's result and gradient are PyTorch's"


def on_cpu() -> str:
    return right(torch.device("cpu"))


def compiler(path: str) -> Finding:
    """Of C++, for lines outside of the table."""
    name, without = "C++ compiler", "lines outside of the CPU's table run as PyTorch's operators, which are slower"
    if not path:
        return Finding(name, "missing", f"none: {without}", "install g++ 12 or newer, or set ONEPASS_CXX")
    began = time.perf_counter()
    try:
        _native.cpu_prepare(RARE_LINE, 0, torch.float32)
    except RuntimeError as error:
        advice = "it must take C++20: g++ 12, clang 14; ONEPASS_CXX names another"
        return Finding(name, "missing", f"{path} fails: {without}: {first_line(error)}", advice)
    took = time.perf_counter() - began
    return Finding(name, "works", f"{path}; a line was {f'compiled in {took:.1f} s' if took > 0.5 else 'ready'}")


def autograd_function() -> Finding:
    """In C++, for the host's time of a call."""
    try:
        _native.open_autograd()
    except RuntimeError as error:
        said = f"none for this torch, a call takes some 20 µs more: {first_line(error)}"
        return Finding("autograd in C++", "missing", said, "install a C++ compiler: it is built once then")
    return Finding("autograd in C++", "works", f"for torch {torch.__version__}")


def cache_folder(path: Path) -> Finding:
    """Where kernels are kept that are compiled at first use."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    room, entries = shutil.disk_usage(there).free, cache.list()
    size = sum(entry.bytes for entry in entries)
    said = f"{path}: {len(entries)} kernels, {size / 2**20:.1f} MiB; {room / 2**30:.1f} GiB free"
    advice = "set ONEPASS_CACHE_DIR to a folder of your own: kernels are compiled again in each process now"
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding("cache", "missing", f"{said}; it cannot be written", advice)
    if room < LEAST_ROOM:
        return Finding("cache", "missing", said, f"make room, or {advice}")
    return Finding("cache", "works", said)


def nvrtc() -> Finding:
    """NVRTC compiles CUDA's kernels, with a GPU or without; without one nothing needs it."""
    state = "fails" if torch.cuda.is_available() else "missing"
    found = find_nvrtc()
    if found is None:
        advice = "install a torch that was built for CUDA, or pip install nvidia-cuda-nvrtc"
        return Finding("NVRTC", state, "none: CUDA's kernels cannot be compiled", advice)
    began = time.perf_counter()
    try:
        # In a folder where nothing is built yet.
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, ONEPASS_CACHE_DIR=folder):
            built = len([*cache.build(["sm_90a"], ["bias | gelu"], [torch.bfloat16], [1024])])
    except RuntimeError as error:
        return Finding("NVRTC", state, f"{found}: {first_line(error)}", "install CUDA 12.8 or newer")
    return Finding("NVRTC", "works", f"{found}; {built} kernels compiled in {time.perf_counter() - began:.1f} s")


def find_nvrtc() -> str | None:
    """NVRTC's version and path."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
    except DynamicLibNotFoundError:
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}, {path}"


def gpus() -> Iterator[Finding]:
    """Each, with a line run on it."""
    if not torch.cuda.is_available():
        reason = "torch was built without CUDA" if torch.version.cuda is None else "torch sees none"
        yield Finding("GPU", "missing", f"none: {reason}", "lines run on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        chip = torch.cuda.get_device_properties(index)
        memory = f"{chip.total_memory / 2**30:.0f} GiB"
        said = (
            f"{chip.name}, sm_{chip.major}{chip.minor}, {chip.multi_processor_count} SMs, {memory}, driver {driver()}"
        )
        if (chip.major, chip.minor) < LEAST_CAPABILITY:
            yield Finding(f"GPU {index}", "fails", said, "lines need compute capability 8.0 or newer")
            continue
        advice = "update the driver to one for torch's CUDA, and look at docs/troubleshooting.md"
        found = checked(f"GPU {index}", lambda index=index: right(torch.device("cuda", index)), advice)
        yield Finding(found.name, found.state, f"{said}; {found.said}", found.advice)


def driver() -> str:
    """The newest CUDA that the driver serves."""
    version = torch._C._cuda_getDriverVersion()
    return f"for CUDA {version // 1000}.{version % 1000 // 10}"
