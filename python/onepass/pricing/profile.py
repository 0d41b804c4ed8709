"""What a device can do: times of operations and of lines, interpolated between measurements."""

from __future__ import annotations

import bisect
import functools
import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

__all__ = ["FEATURES", "PROFILES", "Profile", "profile_of"]

PROFILES = Path(__file__).parent / "profiles"

Rates = dict[str, list[tuple[int, float, float]]]
"""By bytes of a number ("2"): row lengths, and the shares of copy's bandwidth reached forward and backward. Or, of what
a line takes besides, numbers of a tensor and seconds."""


@dataclass(frozen=True)
class Profile:
    """A device, as `onepass calibrate` measured it.

    Attributes:
        name: the device's.
        bandwidth: bytes read and written a second by a large copy.
        fixed: seconds that a kernel takes however small its tensors are.
        call: seconds of host time that an operator of PyTorch's takes.
        call_of_line: seconds of host time that a line takes.
        products: floating-point operations a second of linear layers, by dtype.
        own_products: the same of those that are lines, where the device has them: `linear(panels)`.
        operators: rates of PyTorch's operators, by name, one kernel each.
        lines: rates of lines, by what they have (`FEATURES`).
        starts: seconds that such lines take besides, by the numbers of a tensor: launches, the sums of columns.
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
    starts: dict[str, Rates] = field(default_factory=dict)
    own_products: dict[str, float] = field(default_factory=dict)
    measured: dict[str, str] = field(default_factory=dict)

    @property
    def chip(self) -> str | None:
        """For :meth:`onepass.Line.plan`: "cpu", or a GPU's; None of one whose lines with `linear` nobody has timed."""
        known = {"cpu": "cpu", "H200": "sm_90a", "H100": "sm_90a", "A100": "sm_80"}
        return next((chip for name, chip in known.items() if name in self.name), None)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Profile:
        return Profile(**json.loads(text))

    def moving(self, bytes: float, rate: float = 1.0, kernels: int = 1) -> float:
        """Seconds of kernels that read and write so many bytes."""
        return kernels * self.fixed + bytes / (self.bandwidth * rate) if kernels else 0.0

    def product_rate(self, dtype: torch.dtype, convolves: bool = False) -> float:
        """Floating-point operations a second of the library's products. Of dtypes that are not measured: float16 as
        bfloat16, a byte twice that, float32 on a GPU half of it where TF32 is allowed, as the data sheets have it."""
        name, on_cpu = str(dtype).removeprefix("torch."), self.name == "cpu"
        full, half = self.products["float32"], self.products.get("bfloat16", self.products["float32"])
        if name in ("float32", "complex64") and not on_cpu and _allows_tf32(convolves):
            return max(full, half / 2)
        if name in self.products:
            return self.products[name]
        if name in ("float64", "complex128"):
            return full / 2 if on_cpu else full
        if dtype.itemsize == 1:
            return 2 * half
        return half if dtype.itemsize == 2 else full

    def multiplying_itself(self, flops: float, matrix_bytes: float, dtype: torch.dtype) -> float:
        """Seconds of one of this package, which packs its matrix first; `own_products` has its dtype."""
        return self.moving(2 * matrix_bytes) + flops / self.own_products[str(dtype).removeprefix("torch.")]

    def rate(self, family: str, name: str, columns: int, itemsize: int, backward: bool = False) -> float:
        """The share of copy's bandwidth, of "operators" or "lines"."""
        rates = getattr(self, family).get(name)
        return _of_size(rates, columns, itemsize, backward) if rates else 1.0

    def line_rate(self, features: tuple[str, ...], columns: int, itemsize: int, backward: bool = False) -> float:
        """The same of the line that has most of these."""
        return self.rate("lines", self._nearest(features), columns, itemsize, backward)

    def start(self, features: tuple[str, ...], numbers: int, itemsize: int, backward: bool = False) -> float:
        """Seconds that a line takes beside what moving its bytes does."""
        rates = self.starts.get(self._nearest(features))
        return _of_size(rates, numbers, itemsize, backward) if rates else self.fixed

    def _nearest(self, features: tuple[str, ...]) -> str:
        """The measured line that has most of these features, and the fewest others; the first ones count for more."""
        weights = {feature: 2.0**-i for i, feature in enumerate(FEATURES)}

        def difference(name: str) -> float:
            return sum(weights[feature] for feature in set(name.split()) ^ set(features))

        return min(self.lines, key=difference, default="")


def _allows_tf32(convolves: bool) -> bool:
    backend = torch.backends.cudnn.conv if convolves else torch.backends.cuda.matmul
    return backend.fp32_precision == "tf32"


FEATURES = ("softmax", "norm", "dropout", "column", "activation", "mean")
"""Of a line, what its time depends on beside its bytes: the one that is told first matters most."""


def _of_size(rates: Rates, size: int, itemsize: int, backward: bool) -> float:
    points = rates.get(str(itemsize)) or rates[min(rates, key=lambda other: abs(int(other) - itemsize))]
    return _between(points, size, 2 if backward else 1)


def _between(points: list[tuple[int, float, float]], size: int, column: int) -> float:
    """Interpolated in the logarithm of the size; constant beyond the ends."""
    at = bisect.bisect([p[0] for p in points], size)
    if at in (0, len(points)):
        return points[min(at, len(points) - 1)][column]
    left, right = points[at - 1], points[at]
    share = math.log(size / left[0]) / math.log(right[0] / left[0])
    return left[column] + share * (right[column] - left[column])


SCALED = {
    "h100": ("NVIDIA H100 80GB HBM3", 3.35 / 4.8, {"float32": 1.0, "bfloat16": 1.0}),
    "a100": ("NVIDIA A100-SXM4-80GB", 2.039 / 4.8, {"float32": 19.5 / 67, "bfloat16": 312 / 990}),
}
"""Chips that are estimated from the H200's measurements: bandwidth and products, as the data sheets have them."""
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
        device = _chip(device) if there else "h200" if device.type == "cuda" else device.type
    if device in SCALED:
        return _scaled(profile_of("h200"), *SCALED[device])
    file = PROFILES / f"{device}.json"
    if not file.is_file():
        file = Path(device)
    if not file.is_file():
        known = ", ".join(map(repr, sorted({*SCALED, *(path.stem for path in PROFILES.glob("*.json"))})))
        raise ValueError(f"expected device to be one of {known} or a file of `onepass calibrate`, but got {device!r}")
    return _read(file, file.stat().st_mtime)


def _scaled(measured: Profile, name: str, bandwidth: float, products: dict[str, float]) -> Profile:
    return replace(
        measured,
        name=name,
        bandwidth=measured.bandwidth * bandwidth,
        products={dtype: rate * products[dtype] for dtype, rate in measured.products.items()},
        measured={"estimate": f"the measurements of {measured.name}, scaled as the data sheets are"},
    )


def _chip(device: torch.device) -> str:
    """The known chip that is nearest to a present one."""
    named = [name for name in SCALED if name.upper() in torch.cuda.get_device_name(device)]
    return named[0] if named else CHIPS.get(torch.cuda.get_device_capability(device), "h200")


@functools.cache
def _read(file: Path, changed: float) -> Profile:
    return Profile.from_json(file.read_text(encoding="utf-8"))
