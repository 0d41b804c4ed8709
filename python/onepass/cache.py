"""The disk cache of kernels compiled at first use.

It lies where the platform keeps caches (``$XDG_CACHE_HOME/onepass`` or ``~/.cache/onepass`` on Linux);
``ONEPASS_CACHE_DIR`` names another place. What lies in the package's ``lib/prebuilt``, which a wheel may bring, is
read where the cache has no entry.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from onepass import _native

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120")
COLUMNS = (256, 768, 1024, 4096, 8192, 16384)  # a kernel serves every row length of its bucket


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

    Args:
        archs: chips, as ``"sm_90a"``.
        lines: the ahead-of-time table if not given.
        dtypes: of x and the operands alike.
        columns: row lengths; lengths that share a kernel are built once.

    Yields:
        A line of text for each kernel built or found.
    """
    lines = _native.common_lines() if lines is None else tuple(lines)
    wanted = itertools.product(lines, archs, dtypes, columns)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC compiles without Python's lock
        for labels in pool.map(lambda w: _native.cuda_prebuild(w[0], w[1], w[2], w[2], w[3])["built"], wanted):
            yield from labels
