"""What a device can do: times of operations and of lines, interpolated between measurements."""

from __future__ import annotations

import bisect
import functools
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

__all__ = ["PROFILES", "Profile", "profile_of"]

PROFILES = Path(__file__).parent / "profiles"

Rates = dict[str, list[tuple[int, float, float]]]
"""By bytes of a number ("2"): row lengths, and the shares of copy's bandwidth reached forward and backward."""


@dataclass(frozen=True)
class Profile:
    """A device, as `onepass calibrate` measured it.

    Attributes:
        name: the device's.
        bandwidth: bytes read and written a second by a large copy.
        fixed: seconds that a kernel takes however small its tensors are.
        call: seconds of host time that an operator of PyTorch's takes.
        call_of_line: seconds of host time that a line takes.
        products: floating-point operations a second of large matrix products, by dtype.
        operators: rates of PyTorch's operators, by name, one kernel each.
        lines: rates of lines, by what they have: "elementwise", "dropout", "norm" or "softmax".
        measured: with what, and when; what of it is an estimate.
    """

    name: str
    bandwidth: float
    fixed: float
    call: float
    call_of_line: float
    products: dict[str, float]
    operators: dict[str, Rates] = field(default_factory=dict)
    lines: dict[str, Rates] = field(default_factory=dict)
    measured: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Profile:
        return Profile(**json.loads(text))

    def moving(self, bytes: float, rate: float = 1.0, kernels: int = 1) -> float:
        """Seconds of kernels that read and write so many bytes."""
        return kernels * self.fixed + bytes / (self.bandwidth * rate) if kernels else 0.0

    def multiplying(self, flops: float, bytes: float, dtype: torch.dtype) -> float:
        """Seconds of a matrix product."""
        rate = self.products.get(str(dtype).removeprefix("torch."), self.products["float32"])
        return self.fixed + max(flops / rate, bytes / self.bandwidth)

    def rate(self, family: str, name: str, columns: int, itemsize: int, backward: bool = False) -> float:
        """The share of copy's bandwidth, of "operators" or "lines"."""
        rates = getattr(self, family).get(name)
        if not rates:
            return 1.0
        points = rates.get(str(itemsize)) or rates[min(rates, key=lambda size: abs(int(size) - itemsize))]
        return _between(points, columns, 2 if backward else 1)


def _between(points: list[tuple[int, float, float]], columns: int, column: int) -> float:
    """Interpolated in the logarithm of the row length; constant beyond the ends."""
    at = bisect.bisect([p[0] for p in points], columns)
    if at in (0, len(points)):
        return points[min(at, len(points) - 1)][column]
    left, right = points[at - 1], points[at]
    share = math.log(columns / left[0]) / math.log(right[0] / left[0])
    return left[column] + share * (right[column] - left[column])


CHIPS = {(9, 0): "h200", (8, 0): "a100"}


def profile_of(device: torch.device | str | Profile | None) -> Profile:
    """A profile by a device's name: "h200", "h100", "a100", "cpu", a file that `onepass calibrate` wrote, or a torch
    device, for which the profile of the nearest known chip stands.

    Raises:
        ValueError: for a name that is none of these.
    """
    if isinstance(device, Profile):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, torch.device) or str(device).partition(":")[0] == "cuda":
        device = torch.device(device)
        there = device.type == "cuda" and torch.cuda.is_available()
        device = CHIPS.get(torch.cuda.get_device_capability(device) if there else None, device.type)
        device = "h200" if device == "cuda" else device
    file = PROFILES / f"{device}.json"
    if not file.is_file():
        file = Path(device)
    if not file.is_file():
        known = ", ".join(sorted(repr(path.stem) for path in PROFILES.glob("*.json")))
        raise ValueError(f"expected device to be one of {known} or a file of `onepass calibrate`, but got {device!r}")
    return _read(file, file.stat().st_mtime)


@functools.cache
def _read(file: Path, changed: float) -> Profile:
    return Profile.from_json(file.read_text(encoding="utf-8"))
