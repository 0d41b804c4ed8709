"""The machine and the versions that a benchmark's figures hold for."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import onepass
from onepass.pricing.timing import Clock

__all__ = ["commit", "facts"]


def facts(device: torch.device, clock: Clock) -> dict[str, Any]:
    """All that the figures of a run depend on."""
    return {
        "schema": 1,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "onepass": onepass.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "copy_bytes_per_second": clock.copy_bytes_per_second,
        "method": clock.method,
    }


def commit() -> str | None:
    """The checkout's commit; None for an installed package."""
    package = Path(onepass.__file__).parent
    try:
        subprocess.run(
            ["git", "ls-files", "--error-unmatch", "__init__.py"], cwd=package, check=True, capture_output=True
        )
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=package, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip()


def processor() -> str:
    """The CPU's name."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
