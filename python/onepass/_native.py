"""The native library: loaded once, asked through ctypes for all that is not a tensor (text in, JSON out)."""

from __future__ import annotations

import ctypes
import json
import sys
import sysconfig
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

PACKAGE = Path(__file__).resolve().parent
LIBRARY = PACKAGE / "lib" / "libonepass.so"

# The library's numbering of storage dtypes (onepass/lane/types.h).
DTYPES = {torch.float32: 1, torch.float64: 2, torch.bfloat16: 3, torch.float16: 4, torch.bool: 5}
BROADCAST = 16  # added to an operand's dtype where its shape is not x's


class LineError(ValueError):
    """A line that cannot be read: the message quotes it, with carets under the characters at fault."""


class CompilerMissing(RuntimeError):
    """Something must be compiled, on a machine without a C++ compiler."""


def _load() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise ImportError(f"onepass was not built: {LIBRARY.name} is missing; run `make test` or `pip install .`")
    torch.ops.load_library(str(LIBRARY))
    library = ctypes.CDLL(str(LIBRARY))
    for name in (
        "words",
        "define_word",
        "undefine_word",
        "describe",
        "cost",
        "strategies",
        "gradients",
        "common_lines",
        "cpu_prepare",
        "cuda_prebuild",
        "why_not_grouped",
        "open_autograd",
        "cache",
        "info",
    ):
        getattr(library, f"onepass_{name}").restype = ctypes.c_char_p
    library.onepass_configure.restype = None
    library.onepass_describe.argtypes = [ctypes.c_char_p]
    library.onepass_define_word.argtypes = [*[ctypes.c_char_p] * 4, *[ctypes.c_int] * 2, *[ctypes.c_char_p] * 3]
    library.onepass_undefine_word.argtypes = [ctypes.c_char_p]
    library.onepass_cost.argtypes = [ctypes.c_char_p, *[ctypes.c_int64] * 4, ctypes.c_int]
    library.onepass_strategies.argtypes = [
        ctypes.c_char_p, *[ctypes.c_int64] * 4, ctypes.c_int, ctypes.c_bool, ctypes.c_char_p
    ]  # fmt: skip
    library.onepass_gradients.argtypes = [
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_int64),
        ctypes.c_uint64,
    ]
    library.onepass_cpu_prepare.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
    library.onepass_cuda_prebuild.argtypes = [
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int64
    ]  # fmt: skip
    library.onepass_why_not_grouped.argtypes = [
        ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_char_p
    ]  # fmt: skip
    library.onepass_open_autograd.argtypes = [*[ctypes.c_char_p] * 3, ctypes.c_bool]
    library.onepass_cache.argtypes = [ctypes.c_char_p]
    library.onepass_configure.argtypes = [ctypes.c_char_p, ctypes.c_char_p, FIND_NVRTC, WARN]
    return library


FIND_NVRTC = ctypes.CFUNCTYPE(ctypes.c_void_p)  # a char pointer
WARN = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


_nvrtc_path = ctypes.create_string_buffer(4096)  # C reads it after the callback is gone


@FIND_NVRTC
def _find_nvrtc() -> int:
    """Called when the first CUDA kernel is to be compiled."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    try:
        _nvrtc_path.value = str(load_nvidia_dynamic_lib("nvrtc").abs_path).encode()
    except Exception:  # the library reports what is missing; nothing may be raised through C
        _nvrtc_path.value = b""
    return ctypes.addressof(_nvrtc_path)


@WARN
def _warn(message: bytes) -> None:
    warnings.warn(message.decode(), stacklevel=2)


_library = _load()
_library.onepass_configure(str(PACKAGE / "include").encode(), str(LIBRARY.parent).encode(), _find_nvrtc, _warn)


def _answer(raw: bytes):
    result = json.loads(raw)
    if isinstance(result, dict) and "error" in result:
        kind = {"line": LineError, "compiler_missing": CompilerMissing}.get(result["error"], RuntimeError)
        raise kind(result["message"])
    return result


@cache
def words() -> list[dict]:
    """Every word's descriptor."""
    return _answer(_library.onepass_words())


def define_word(
    name: str,
    operand: str,
    operand_name: str,
    parameters: tuple[str, ...],
    flops: tuple[int, int],
    formula: str,
    meaning: str,
    source: str,
) -> None:
    """Adds a user's word to the vocabulary.

    Raises:
        RuntimeError: for one that is there already.
    """
    texts = (text.encode() for text in (name, operand, operand_name, ",".join(parameters)))
    rest = (text.encode() for text in (formula, meaning, source))
    _answer(_library.onepass_define_word(*texts, *flops, *rest))
    _forget()


def undefine_word(name: str) -> None:
    """Takes it out again."""
    _answer(_library.onepass_undefine_word(name.encode()))
    _forget()


def _forget() -> None:
    for known in (words, describe, gradients, why_not_grouped):
        known.cache_clear()


@cache
def describe(line: str) -> dict:
    """A line's words, and what its backward reads."""
    readable = line.replace("\0", "\N{REPLACEMENT CHARACTER}")  # C would stop at a zero
    return _answer(_library.onepass_describe(readable.encode(errors="replace")))


def cost(line: str, rows: int, columns: int, columns_behind: int, matrices: int, dtype: torch.dtype) -> dict:
    """Bytes that must move and flops, forward and backward; columns_behind: of what a contraction gives, with so many
    matrices."""
    return _answer(_library.onepass_cost(line.encode(), rows, columns, columns_behind, matrices, DTYPES[dtype]))


def strategies(
    line: str,
    rows: int,
    columns: int,
    columns_behind: int,
    matrices: int,
    dtype: torch.dtype,
    saves: bool,
    chip: str,
) -> list[dict]:
    """The ways of a line with a contraction on a chip ("sm_90a", "cuda:0"): bytes, seconds, and which is chosen."""
    dtype_number = DTYPES[dtype]
    return _answer(
        _library.onepass_strategies(
            line.encode(), rows, columns, columns_behind, matrices, dtype_number, saves, chip.encode()
        )
    )


@cache
def gradients(line: str, dtype: int, operand_types: tuple[int, ...], wanted: int) -> dict:
    """Where each input's gradient comes from, and the tensors that the backward op returns."""
    types = (ctypes.c_int64 * max(1, len(operand_types)))(*operand_types)
    return _answer(_library.onepass_gradients(line.encode(), dtype, types, wanted))


@cache
def why_not_grouped(line: str, columns: int, features: int, dtype: torch.dtype, chip: str) -> str:
    """Why a list of tensors is not one call of a line, for rows of so many columns on "cpu" or "cuda:0"."""
    dtype_number = DTYPES[dtype]
    return _answer(_library.onepass_why_not_grouped(line.encode(), columns, features, dtype_number, chip.encode()))[
        "why_not"
    ]


def common_lines() -> list[str]:
    """The lines that are compiled ahead of time for the CPU."""
    return _answer(_library.onepass_common_lines())


def cpu_prepare(line: str, boolean_masks: int) -> dict:
    """Compiles a line for the CPU if it is not in the table.

    Raises:
        CompilerMissing: if there is no C++ compiler.
    """
    return _answer(_library.onepass_cpu_prepare(line.encode(), boolean_masks))


def cuda_prebuild(line: str, arch: str, dtype: torch.dtype, operand_dtype: torch.dtype, columns: int) -> dict:
    """Compiles a line's CUDA kernels for a row length into the disk cache; needs no GPU."""
    return _answer(
        _library.onepass_cuda_prebuild(line.encode(), arch.encode(), DTYPES[dtype], DTYPES[operand_dtype], columns)
    )


def open_autograd(may_compile: bool = True) -> Callable | None:
    """Opens the autograd function in C++: as built for the installed torch, else, where it may be, from the disk cache
    or compiled now.

    Returns:
        What src/torch/front.h calls a line with; None where that is not there.

    Raises:
        CompilerMissing: if there is no C++ compiler.
        RuntimeError: with the compiler's message, if it fails.
    """
    root = Path(torch.__file__).resolve().parent
    texts = (str(text).encode() for text in (root, torch.__version__, sysconfig.get_path("include")))
    handle = _answer(_library.onepass_open_autograd(*texts, may_compile))["handle"]
    if not handle or "t" in sys.abiflags:  # a Python without the GIL, whose objects begin differently
        return None
    front = getattr(ctypes.PyDLL("autograd", handle=handle), "onepass_front", None)
    if front is None:  # it was compiled without Python's headers
        return None
    front.restype = ctypes.py_object
    return front()


def cache(action: str) -> list[dict] | dict:
    """'list' or 'clear' the disk cache."""
    return _answer(_library.onepass_cache(action.encode()))


def info() -> dict:
    """The SIMD target in use, where kernels are cached, and the C++ compiler for lines outside the table."""
    return _answer(_library.onepass_info())
