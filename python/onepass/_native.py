"""The native library: loaded once, asked through ctypes for all that is not a tensor (text in, JSON out)."""

from __future__ import annotations

import ctypes
import json
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path

import torch

from onepass._log import taking_seconds

PACKAGE = Path(__file__).resolve().parent
LIBRARY = PACKAGE / "lib" / "libonepass.so"

BROADCAST, SUMMED, HAS, UNIT = 16, 32, 64, 1 << 56
"""Added to an operand's dtype (src/line/signature.h): its shape is not x's; its gradient is a sum over rows; times the
bits of x's leading dimensions that it has."""


LEAST_TORCH = 2, 10
if tuple(map(int, torch.__version__.split(".")[:2])) < LEAST_TORCH:
    raise ImportError(f"onepass needs torch {LEAST_TORCH[0]}.{LEAST_TORCH[1]} or newer; this is {torch.__version__}")


class LineError(ValueError):
    """A line that cannot be read: the message quotes it, with carets under the characters at fault."""


class CannotCompile(RuntimeError):
    """Something must be compiled, on a machine without a C++ compiler, or with one that fails: the message says how,
    and what to set."""


class _Interrupted(RuntimeError):
    """A compilation was given up, since a signal came for the thread that wanted one."""


REMEMBERED = 1024
"""Lines, and what follows from them, of which the least recently used are forgotten."""


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
        "check_shape",
        "strategies",
        "beside_engines",
        "gradients",
        "common_lines",
        "dtypes",
        "cpu_prepare",
        "cuda_prebuild",
        "open_autograd",
        "cache",
        "tuning",
        "info",
        "launches",
    ):
        getattr(library, f"onepass_{name}").restype = ctypes.c_char_p
    library.onepass_configure.restype = library.onepass_interrupt.restype = None
    library.onepass_describe.argtypes = [ctypes.c_char_p]
    library.onepass_define_word.argtypes = [
        *[ctypes.c_char_p] * 5, *[ctypes.c_int] * 3, *[ctypes.c_bool] * 2, ctypes.c_double, *[ctypes.c_char_p] * 3
    ]  # fmt: skip
    library.onepass_undefine_word.argtypes = [ctypes.c_char_p]
    library.onepass_cost.argtypes = [ctypes.c_char_p, *[ctypes.c_int64] * 4, ctypes.c_int]
    library.onepass_check_shape.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64), ctypes.c_int]
    library.onepass_strategies.argtypes = [
        ctypes.c_char_p, *[ctypes.c_int64] * 4, ctypes.c_int, ctypes.c_bool, ctypes.c_char_p
    ]  # fmt: skip
    library.onepass_launches.argtypes = [
        ctypes.c_char_p, *[ctypes.c_int64] * 2, ctypes.c_int, ctypes.c_bool, ctypes.c_char_p
    ]  # fmt: skip
    library.onepass_gradients.argtypes = [
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_int64),
        ctypes.c_uint64,
    ]
    library.onepass_cpu_prepare.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_bool]
    library.onepass_cuda_prebuild.argtypes = [
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int64
    ]  # fmt: skip
    library.onepass_open_autograd.argtypes = [*[ctypes.c_char_p] * 3, ctypes.c_bool]
    library.onepass_cache.argtypes = [ctypes.c_char_p]
    library.onepass_tuning.argtypes = [ctypes.c_char_p] * 4
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
        raise _ERRORS.get(result["error"], RuntimeError)(result["message"])
    return result


_ERRORS = {"line": LineError, "cannot_compile": CannotCompile, "interrupted": _Interrupted}

DTYPES = {getattr(torch, name): number for number, name in enumerate(_answer(_library.onepass_dtypes()), 1)}
"""The library's numbers of the dtypes that it knows."""


def _compiled(what: str, ask: Callable[[], bytes]):
    """What is asked, which may take a compiler's seconds, and says so."""
    with taking_seconds(what):
        return _interruptible(ask)


def _interruptible(ask: Callable[[], bytes]):
    """Signals' handlers run in the main thread, which is kept free for them: Ctrl-C ends the compiler, and is a
    KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        while True:
            try:
                return _answer(ask())
            except _Interrupted:  # the main thread's, and not this one
                continue
    answers: list[bytes] = []
    done = threading.Lock()

    def run() -> None:
        try:
            answers.append(ask())
        finally:
            done.release()

    done.acquire()
    thread = threading.Thread(target=run, name="onepass-compile", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends
        return _answer(ask())
    try:
        done.acquire()
    except BaseException:
        _library.onepass_interrupt()
        thread.join()
        raise
    return _answer(answers[0])


def dtype_number(function: str, dtype: torch.dtype) -> int:
    """The library's number of a floating-point dtype.

    Raises:
        TypeError: for what is no dtype.
        RuntimeError: for another dtype.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{function}(): argument 'dtype' must be torch.dtype, not {type(dtype).__name__}")
    if dtype not in DTYPES or not dtype.is_floating_point or dtype.itemsize == 1:
        raise RuntimeError(
            f"{function}(): dtype must be torch.float32, torch.float64, torch.bfloat16 or torch.float16, got {dtype}"
        )
    return DTYPES[dtype]


@cache
def words() -> list[dict]:
    """Every word's descriptor."""
    return _answer(_library.onepass_words())


def define_word(
    name: str,
    kind: str,
    operand: str,
    operand_name: str,
    parameters: tuple[str, ...],
    sums: int,
    flops: tuple[int, int],
    maps_zero_to_zero: bool,
    of_nothing: float | None,
    formula: str,
    meaning: str,
    source: str,
) -> None:
    """Adds a user's word to the vocabulary. `of_nothing`: an ending's number of a row without elements; None: there is
    none.

    Raises:
        RuntimeError: for one that is there already.
    """
    texts = (text.encode() for text in (name, kind, operand, operand_name, ",".join(parameters)))
    rest = (text.encode() for text in (formula, meaning, source))
    facts = (sums, *flops, maps_zero_to_zero, of_nothing is None, of_nothing or 0.0)
    _answer(_library.onepass_define_word(*texts, *facts, *rest))
    _forget()


def undefine_word(name: str) -> None:
    """Takes it out again."""
    _answer(_library.onepass_undefine_word(name.encode()))
    _forget()


def _forget() -> None:
    for known in (words, describe, gradients):
        known.cache_clear()


@lru_cache(maxsize=REMEMBERED)
def describe(line: str) -> dict:
    """A line's words, and what its backward reads."""
    readable = line.replace("\0", "\N{REPLACEMENT CHARACTER}")  # C would stop at a zero
    return _answer(_library.onepass_describe(readable.encode(errors="replace")))


def result_dtypes(line: str, dtype: torch.dtype) -> list[torch.dtype]:
    """Of each result of a line without a contraction, for x of this dtype."""
    facts, wide = describe(line), torch.promote_types(dtype, torch.float32)
    own = ["float32" if number else of for of, number in zip(facts["own_dtypes"], facts["numbers"])]
    return [dtype if of is None else wide if of == "float32" else getattr(torch, of) for of in own]


def result_shapes(line: str, shape: torch.Size) -> list[tuple[int, ...]]:
    """Of each result of a line without a contraction, for x of this shape.

    Raises:
        RuntimeError: for rows that are not whole groups of columns, where each has a scale.
    """
    facts = describe(line)
    group = facts["group"]
    if group and (not shape or shape[-1] % group):
        name = f"{facts['words'][-1]['name']}({facts['words'][-1]['dtype']}, {group})"
        raise RuntimeError(
            f"onepass: '{name}' needs rows whose length is a multiple of {group}, got x of shape {list(shape)}"
        )
    if not shape:
        return [()] * len(facts["numbers"])
    scales = (shape[-1] // group,) if group else (1,)
    last = [
        scales if scale else () if number else shape[-1:] for number, scale in zip(facts["numbers"], facts["scales"])
    ]
    return [(*shape[:-1], *own) for own in last]


def cost(line: str, rows: int, columns: int, columns_behind: int, matrices: int, dtype: torch.dtype) -> dict:
    """Bytes that must move and flops, forward and backward; columns_behind: of what a contraction gives, with so many
    matrices."""
    return _answer(_library.onepass_cost(line.encode(), rows, columns, columns_behind, matrices, DTYPES[dtype]))


def check_shape(line: str, shape: tuple[int, ...]) -> None:
    """
    Raises:
        RuntimeError: where a line without a contraction takes no x of this shape.
    """
    _answer(_library.onepass_check_shape(line.encode(), (ctypes.c_int64 * len(shape))(*shape), len(shape)))


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


def launches(line: str, rows: int, columns: int, dtype: torch.dtype, saves: bool, chip: str) -> list[dict]:
    """What forward of a line without a contraction launches on a CUDA chip ("sm_90a", "cuda:0"), in order: kernel,
    cluster (blocks that share a row), threads (of a row in a block), rows (of a block), blocks."""
    return _answer(_library.onepass_launches(line.encode(), rows, columns, DTYPES[dtype], saves, chip.encode()))


def beside_engines() -> dict:
    """Where an attention that torch's engines can compute is a line here, on "cuda" and on the "cpu"."""
    return _answer(_library.onepass_beside_engines())


@lru_cache(maxsize=REMEMBERED)
def gradients(line: str, dtype: int, operand_types: tuple[int, ...], wanted: int) -> dict:
    """Where each input's gradient comes from, and the tensors that the backward op returns."""
    types = (ctypes.c_int64 * max(1, len(operand_types)))(*operand_types)
    return _answer(_library.onepass_gradients(line.encode(), dtype, types, wanted))


def common_lines() -> list[str]:
    """The lines that are compiled ahead of time for the CPU."""
    return _answer(_library.onepass_common_lines())


def cpu_prepare(line: str, boolean_masks: int, dtype: torch.dtype | None) -> dict:
    """Compiles a line for the CPU and x of a dtype, or of any, if it is not in the table.

    Raises:
        CannotCompile: if there is no C++ compiler, or none that does.
        RuntimeError: with the compiler's message, if a word of a user does not compile.
    """
    of = line.encode(), boolean_masks, DTYPES.get(dtype, 0)
    ready = _answer(_library.onepass_cpu_prepare(*of, False))
    if ready["ready"]:
        return ready
    return _compiled(f'the line "{line}"', lambda: _library.onepass_cpu_prepare(*of, True))


def cuda_prebuild(line: str, arch: str, dtype: torch.dtype, operand_dtype: torch.dtype, columns: int) -> dict:
    """Compiles a line's CUDA kernels for a row length into the disk cache; needs no GPU."""
    return _answer(
        _library.onepass_cuda_prebuild(line.encode(), arch.encode(), DTYPES[dtype], DTYPES[operand_dtype], columns)
    )


def open_autograd(may_compile: bool = True) -> Callable | None:
    """Opens the autograd function in C++: as built for the installed torch, else, where it may be, from the disk cache
    or compiled now.

    Returns:
        What src/torch/autograd/fast_path.h calls a line with; None where that is not there.

    Raises:
        CannotCompile: if there is no C++ compiler, or none that does.
    """
    root = Path(torch.__file__).resolve().parent
    texts = [str(text).encode() for text in (root, torch.__version__, sysconfig.get_path("include"))]
    handle = _answer(_library.onepass_open_autograd(*texts, False))["handle"]
    if not handle and may_compile:
        what = f"the autograd function for torch {torch.__version__}"
        handle = _compiled(what, lambda: _library.onepass_open_autograd(*texts, True))["handle"]
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


def tuning(action: str, key: str = "", way: str = "", label: str = "") -> list | dict:
    """Listens to calls' kernels, and says, builds, uses or keeps the ways of one (src/torch/api/api.h).

    Raises:
        RuntimeError: for a key that was not heard, a way that no kernel has, or with NVRTC's message where it fails.
    """
    return _answer(_library.onepass_tuning(*(text.encode() for text in (action, key, way, label))))


@contextmanager
def listening() -> Iterator[None]:
    """What `tuning` has as "heard" and "launched" is what runs within."""
    tuning("listen")
    try:
        yield
    finally:
        tuning("stop")


def info() -> dict:
    """The SIMD target in use, where kernels are cached, and the C++ compiler for lines outside the table."""
    return _answer(_library.onepass_info())
