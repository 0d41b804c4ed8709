"""The CUDA kernels, and the forms that each has: what the calls of sanitized_calls.py must reach."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What of a kernel's Config tells its forms apart: each is to be reached by some call. A pattern stands in the source
# that the kernel is compiled from.
FORMS = {
    "elementwise_forward": {
        "one long row": r"kFlat = true",
        "rows": r"kFlat = false",
        "rows that begin anywhere": r"kStaged = [1-9]",
        "several tensors": r"kMembers = [1-9]",
        "float64": r"arithmetic = double",
        "one number for a row": r"kSingleOperand = [1-9]",
    },
    "elementwise_backward": {
        "one part": r"kOnePart = true",
        "several parts": r"kOnePart = false[\s\S]*kWantsColumn = [1-9]",
        "no sums": r"kWantsColumn = 0",
        "rows that begin anywhere": r"kStaged = [1-9]",
        "several tensors": r"kMembers = [1-9]",
        "float64": r"arithmetic = double",
    },
    "rowwise_forward": {
        "in a thread": r"kAcross = 1;[\s\S]*kCluster = 1;",
        "in a warp": r"kAcross = (2|4|8|16|32);[\s\S]*kCluster = 1;",
        "operands early": r"kEarly = [1-9]",
        "in a block": r"kAcross = (64|128|256|512|1024);[\s\S]*kCluster = 1;",
        "in a cluster": r"kCluster = [2-8];",
        "made again": r"kRecomputes = true",
        "two rows in flight": r"kAhead = true",
        "rows ahead": r"kStages = [1-9]",
        "statistics alone": r"kOnlyStatistics = true",
        "rows that begin anywhere": r"kStaged = [1-9]",
        "rows that end within a lane": r"kRagged = true",
        "several tensors": r"kMembers = [1-9]",
        "float64": r"arithmetic = double",
    },
    "rowwise_backward": {
        "in a warp": r"kAcross = (8|16|32);[\s\S]*kCluster = 1;",
        "in a block": r"kAcross = (64|128|256|512|1024);[\s\S]*kCluster = 1;",
        "in a cluster": r"kCluster = [2-8];",
        "in a cluster of sixteen": r"kCluster = 16;",
        "made again": r"kRecomputes = true",
        "two rows in flight": r"kAhead = true",
        "sums in shared memory": r"kSumsInRegisters = false",
        "a part of a group of rows": r"kGroupedOperand = [1-9][\s\S]*kGroupsABlock = 0;",
        "a group of rows": r"kGroupedOperand = [1-9][\s\S]*kGroupsABlock = 1;",
        "groups of rows in turn": r"kGroupedOperand = [1-9][\s\S]*kGroupsABlock = 2;",
        "one part": r"kOnePart = true",
        "the result again": r"kWantsRecompute = true",
        "in place": r"kInPlace = true",
        "rows that begin anywhere": r"kStaged = [1-9]",
        "several tensors": r"kMembers = [1-9]",
        "float64": r"arithmetic = double",
    },
    "rowwise_forward_streamed": {
        "in a warp": r"kAcross = 32;",
        "in a block": r"kAcross = (64|128|256);",
        "whole rounds": r"kExact = true",
        "rows that begin anywhere": r"kAccess = 1;",
        "rows that end within a lane": r"kRagged = true",
        "several tensors": r"kMembers = [1-9]",
        "float64": r"arithmetic = double",
    },
    "rowwise_forward_paired": {
        "in a warp": r"kAcross = 32;",
        "in a block": r"kAcross = (64|128|256);",
        "rows that begin anywhere": r"kAccess = 1;",
        "rows that end within a lane": r"kRagged = true",
        "several tensors": r"kMembers = [1-9]",
        "float64": r"arithmetic = double",
    },
    "rowwise_backward_tiles": {
        "dx in place, its rows padded": r"kStridedDx = true[\s\S]*kRagged = true",
    },
    "rowwise_forward_parts": {"rows that begin anywhere": r"kAccess = 1;", "aligned": r"kAccess = 8;"},
    "rowwise_backward_parts": {"rows that begin anywhere": r"kAccess = 1;", "aligned": r"kAccess = 8;"},
    "add_columns": {"float": r"<float", "double": r"<double", "many sums": r"ONEPASS_SUMS [1-9]\d\d"},
    "linear_forward": {
        "64 columns": r"kTileN = 64;",
        "128 columns": r"kTileN = 128;",
        "more columns": r"kTileN = (192|256);",
        "one block": r"kBuffers[\s\S]*kCluster = 1;",
        "two blocks": r"kBuffers[\s\S]*kCluster = 2;",
        "deferred, moments taken": r"kTakesMoments = 1;",
        "deferred, statistics given": r"kDefers = 1;\s*static constexpr int kTakesMoments = 0;",
    },
    "small_m_forward": {"one tile of rows": r"kRowTiles = 1;", "two": r"kRowTiles = 2;"},
    "small_n_forward": {"float": r"arithmetic = float", "float64": r"arithmetic = double"},
    "attention_forward_sm80": {"causal": r"kCausal = 1;", "all keys": r"kCausal = 0;"},
    "attention_forward_sm90": {
        "with values": r"kValueAtoms = [1-9]",
        "scores alone": r"kValueAtoms = 0;",
        "causal": r"kCausal = 1;",
        "deep": r"kAtoms = [34];",
    },
    "probabilities_forward_sm90": {
        "one block": r"kKeyMasks[\s\S]*__launch_bounds__\(\d+, \d+\) onepass",
        "in a cluster": r"__cluster_dims__\([2-8],",
        "in a cluster of sixteen": r"__cluster_dims__\(16,",
        "keys left out": r"kKeyMasks = [1-9]",
    },
    "probabilities_backward_sm90": {
        "one block": r"__cluster_dims__\(1,",
        "in a cluster": r"__cluster_dims__\([2-8],",
        "in a cluster of sixteen": r"__cluster_dims__\(16,",
        "deep": r"kAtoms = 2;",
    },
    "attention_backward_queries_sm90": {"causal": r"kCausal = 1;", "deep": r"kAhead = 0;", "all keys": r"kCausal = 0;"},
    "attention_backward_keys_sm90": {
        "causal": r"kCausal = 1;",
        "keys alone": r"kWantsKeys = 1;\s*static constexpr int kWantsValues = 0;",
        "values alone": r"kWantsKeys = 0;\s*static constexpr int kWantsValues = 1;",
        "both": r"kWantsKeys = 1;\s*static constexpr int kWantsValues = 1;",
    },
    "attention_backward_queries_sm80": {"causal": r"kCausal = 1;", "all keys": r"kCausal = 0;"},
    "attention_backward_keys_sm80": {"causal": r"kCausal = 1;", "all keys": r"kCausal = 0;"},
}  # fmt: skip


def kernels_known() -> tuple[str, ...]:
    """Of src/cuda/kernels.h."""
    return tuple(re.findall(r'"(\w+)"', (ROOT / "src" / "cuda" / "kernels.h").read_text()))


def forms_in(cache: Path) -> dict[str, set[str]]:
    """The forms of kernels whose sources the entries of a cache hold."""
    found: dict[str, set[str]] = {}
    for entry in cache.glob("*.cubin"):
        source = entry.read_bytes().decode("latin-1")  # and the cubin behind it, which has no such text
        names = re.findall(r" onepass_(\w+)\(const __grid_constant__", source)
        if len(names) == 1:
            forms = FORMS.get(names[0], {})
            found.setdefault(names[0], set()).update(f for f, pattern in forms.items() if re.search(pattern, source))
    return found
