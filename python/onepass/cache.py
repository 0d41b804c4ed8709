"""The disk cache of kernels compiled at first use.

It lies where the platform keeps caches (``$XDG_CACHE_HOME/onepass`` or ``~/.cache/onepass`` on Linux);
``ONEPASS_CACHE_DIR`` names another place. Entries run in the process that reads them: a directory or file that another
user than root owns, or may write, is not read but built again elsewhere, with one warning. What lies in the package's
``lib/prebuilt``, which a wheel may bring, is read where the cache has no entry.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from onepass import _native

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120")
COLUMNS = (256, 768, 1024, 4096, 8192, 16384)  # a kernel serves every row length of its bucket
MOST_COLUMNS = 2**40


@dataclass(frozen=True)
class Entry:
    """One kernel in the cache: what it was built from, its size in bytes and its age in seconds."""

    label: str
    kind: str
    bytes: int
    age: float


def list() -> list[Entry]:  # noqa: A001 - named as the command is
    """The entries of the disk cache."""
    return [Entry(**entry) for entry in _native.cache("list")]


def clear() -> int:
    """Removes every entry; returns how many there were."""
    return _native.cache("clear")["removed"]


def build(
    archs: Iterable[str] = ARCHITECTURES,
    lines: Iterable[str] | None = None,
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
    columns: Iterable[int] = COLUMNS,
) -> Iterator[str]:
    """Compiles CUDA kernels into the disk cache ahead of their first use; needs NVRTC but no GPU.

    Of lines with `linear` or `scores` these are the kernels of the words before and behind, which run beside the
    library's product; kernels of tensor cores, whose tiles follow from the matrix, are compiled at their first use.

    Args:
        archs: chips, as ``"sm_90a"``.
        lines: the ahead-of-time table if not given.
        dtypes: of x and the operands alike.
        columns: row lengths; lengths that share a kernel are built once.

    Yields:
        A line of text for each kernel built or found.

    Raises:
        LineError: for a line that cannot be read.
        TypeError, ValueError: for lengths that are no positive integers.
        RuntimeError: for a dtype that no line takes, a chip that is not known, a length that a line does not take; with
            NVRTC's message where it fails.
    """
    lines = _native.common_lines() if lines is None else tuple(lines)
    archs, dtypes, columns = tuple(archs), tuple(dtypes), tuple(map(_checked_length, columns))
    for dtype in dtypes:
        _native.dtype_number("build", dtype)
    return _build(lines, archs, dtypes, columns)


def _checked_length(value: int) -> int:
    try:
        length = operator.index(value)
    except TypeError:
        raise TypeError(f"build(): argument 'columns' must be of ints, not {type(value).__name__}") from None
    if not 1 <= length <= MOST_COLUMNS:
        raise ValueError(f"build(): expected columns from 1 to 2^40, got {length}")
    return length


def _build(
    lines: tuple[str, ...], archs: tuple[str, ...], dtypes: tuple[torch.dtype, ...], columns: tuple[int, ...]
) -> Iterator[str]:
    wanted = itertools.product(lines, archs, dtypes, columns)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC compiles without Python's lock
        for labels in pool.map(lambda w: _native.cuda_prebuild(w[0], w[1], w[2], w[2], w[3])["built"], wanted):
            yield from labels
