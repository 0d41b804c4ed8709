"""Roofs as measured, where each operator and line lies below them, and what that says about fusing it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from onepass.bench.report import DIRECTIONS, OURS, Row, short
from onepass.case.report import size_and_dtype
from onepass.line import Line
from onepass.pricing.timing import Clock, Run

__all__ = ["BY_HAND", "MATMUL", "RELU_BY_HAND", "claims", "measure", "points", "verdicts"]

BY_HAND, RELU_BY_HAND, MATMUL = "layer_norm by hand", "relu(layer_norm) by hand", "matmul"
SIDES = {"cuda": (4096, 8192), "cpu": (512, 1024)}  # of square matrices whose product is the roof of arithmetic
SAME = 1.1  # so many times a line's bytes are as good as its own
RULE_OF_THUMB = 100  # flops a byte below which to fuse, it is said
SAID = {  # to gain so many times
    BY_HAND: (2, 4),
    "rms_norm by hand": (2, 4),
    "mul + add + softmax": (2, 3),
    "bias + dropout + add": (2, 3),
    "swiglu": (1.5, 2),
}

Roofs = dict[str, Any]
Point = dict[str, Any]


def measure(clock: Clock, device: torch.device, dtypes: list[torch.dtype], quick: bool) -> Roofs:
    """Copy bandwidth, the best rate of square products of each dtype, and what one more launch takes."""
    rates = {}
    for dtype in dtypes:
        found = []
        for side in SIDES[device.type][: 1 if quick else 2]:
            a, b = torch.randn(2, side, side, device=device).to(dtype)
            seconds = clock.median({"": Run(lambda a=a, b=b: a @ b)}, 0.1 if quick else 0.5)[""]
            found.append(2 * side**3 / seconds)
        rates[name_of(dtype)] = max(found)
    one, many = torch.ones(1, device=device), 33
    runs = {n: Run(lambda n=n: [one + one for _ in range(n)]) for n in (1, many)}
    launches = clock.median(runs, 0.1)
    return {
        "copy_bytes_per_second": clock.copy_bytes_per_second,
        "flops_per_second": rates,
        "launch_us": 1e6 * (launches[many] - launches[1]) / (many - 1),
    }


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def points(rows: list[Row], roofs: Roofs, device_type: str) -> list[Point]:
    """One for each direction of each row whose bytes and time are known."""
    found = []
    for row in rows:
        line, dtype = Line(row["line"]), getattr(torch, row["dtype"])
        cost = line.cost(row["shape"], dtype, row["out_features"] or None)
        for direction in DIRECTIONS:
            moved, spent = row[f"{direction}_bytes"], row[f"{direction}_us"]
            if not moved or not spent:
                continue
            launches = row[f"{direction}_kernels" if device_type == "cuda" else f"{direction}_operators"]
            kept = ("pattern", "line", "shape", "dtype", "layout", "out_features", "provider", "error_ratio")
            place = {key: row[key] for key in kept} | {"direction": direction, "us": spent, "launches": launches}
            found.append(place | place_of(moved, getattr(cost, direction).flops, spent, launches, line, dtype, roofs))
    return found


def place_of(
    moved: int, flops: int, us: float, launches: int, line: Line, dtype: torch.dtype, roofs: Roofs
) -> dict[str, Any]:
    """Rates, the roof that is the lowest there, and the share of it that is reached.

    Products run in units of their own, whose rate is that of their dtype; all other arithmetic is float32's.
    """
    rates = roofs["flops_per_second"]
    rate = rates.get(name_of(dtype if line.weight is not None else torch.float32), min(rates.values()))
    least = {  # microseconds
        "memory": 1e6 * moved / roofs["copy_bytes_per_second"],
        "compute": 1e6 * flops / rate,
        "launch": launches * roofs["launch_us"],
    }
    bound = max(least, key=lambda name: least[name])
    return {
        "bytes": moved,
        "flops": flops,
        "intensity": flops / moved,
        "bytes_per_second": 1e6 * moved / us,
        "flops_per_second": 1e6 * flops / us,
        "bound": bound,
        "reached": least[bound] / us,
    }


def pairs(found: list[Point]) -> Iterator[tuple[Point, Point]]:
    """Each direction of each size, unfused and fused."""
    known = {key_of(point): point for point in found if point["provider"] == OURS}
    for point in found:
        if point["provider"] == "eager" and key_of(point) in known:
            yield point, known[key_of(point)]


def key_of(point: Point) -> tuple:
    return point["pattern"], *point["shape"], point["out_features"], point["dtype"], point["direction"]


def verdicts(found: list[Point], rows: list[Row]) -> list[dict[str, Any]]:
    """What the unfused operators' place says about fusing them, beside what fusing did, by us and torch.compile."""
    compiled = {
        key_of(row | {"direction": direction}): row[f"{direction}_us"]
        for row in rows
        for direction in DIRECTIONS
        if row["provider"] == "compile" and row[f"{direction}_us"]
    }
    return [
        {key: before[key] for key in ("pattern", "shape", "dtype", "layout", "out_features", "direction", "bound")}
        | {
            "verdict": verdict(before, after),
            "less": before["bytes"] / after["bytes"],
            "gain": before["us"] / after["us"],
            "compile_gain": before["us"] / compiled[key_of(before)] if key_of(before) in compiled else None,
        }
        for before, after in pairs(found)
    ]


def verdict(before: Point, after: Point) -> str:
    """In a word or two: what bounds it, and whether there is anything to fuse."""
    if before["bound"] == "compute":
        return "don't: compute"
    if before["bound"] == "launch":
        return "fuse: launches" if before["launches"] > after["launches"] else "nothing to fuse"
    return "fuse: memory" if before["bytes"] > SAME * after["bytes"] else "nothing to fuse"


def claims(found: list[Point], roofs: Roofs, device_type: str) -> Iterator[str]:
    """Rules of thumb about fusion, each beside what was measured here."""
    made = "kernels" if device_type == "cuda" else "operators"
    forward = [(before, after) for before, after in pairs(found) if before["direction"] == "forward"]
    by_name = {before["pattern"]: (before, after) for before, after in forward if before["dtype"] == "float32"}
    if RELU_BY_HAND in by_name:  # the last, largest one
        before, after = by_name[RELU_BY_HAND]
        tensor = before["shape"][0] * before["shape"][1] * 4
        yield (
            f"{size_and_dtype(before)}, relu(layer_norm) by hand: said to move 10 tensors unfused and 2 fused, 5 times "
            f"less. Its {before['launches']} {made} move {before['bytes'] / tensor:.1f} here, the line "
            f"{after['bytes'] / tensor:.1f}: {before['bytes'] / after['bytes']:.1f} times less, "
            f"{before['us'] / after['us']:.1f} times as fast."
        )
    if BY_HAND in by_name:
        before, after = by_name[BY_HAND]
        yield (
            f"layer_norm: said to have 1.25 flops a byte in fp32. The line has {after['intensity']:.2f}, by hand "
            f"{before['intensity']:.2f}, since its flops are the same and its bytes are not."
        )
    yield from gains(found)
    yield from of_products(forward)
    yield from rule_of_thumb(found, roofs)


def gains(found: list[Point]) -> Iterator[str]:
    """Of the largest float32 size, forward and backward, beside what is said of each."""
    told = {}
    for before, after in pairs(found):
        if before["pattern"] in SAID and before["dtype"] == "float32":
            told.setdefault(before["pattern"], {})[before["direction"]] = before["us"] / after["us"]
    for name, gain in told.items():
        low, high = SAID[name]
        here = " and ".join(f"{gain[direction]:.1f} {direction}" for direction in DIRECTIONS if direction in gain)
        yield f"{name}: fusing it is said to gain {low} to {high} times. Here it is {here}."


def of_products(forward: list[tuple[Point, Point]]) -> Iterator[str]:
    """N, or less."""
    squares = [after for before, after in forward if before["pattern"] == MATMUL]
    for point in squares[-1:]:
        n = point["shape"][0]
        yield (
            f"A product of matrices of {n} numbers a side: said to have as many flops a byte. It has "
            f"{point['intensity']:.0f} in {short(point['dtype'])}: three matrices of "
            f"{getattr(torch, point['dtype']).itemsize} bytes a number move, not two of one."
        )


def rule_of_thumb(found: list[Point], roofs: Roofs) -> Iterator[str]:
    """Where the roofs of this device meet, and what lies on the wrong side of the rule."""
    for dtype, rate in roofs["flops_per_second"].items():
        speed = roofs["copy_bytes_per_second"]
        yield (
            f"Said to be worth fusing: what has less than {RULE_OF_THUMB} flops a byte. In {short(dtype)} the roofs of "
            f"this device meet at {rate / speed:.0f}: {rate / 1e12:.3g} Tflop/s over {speed / 1e9:.4g} GB/s."
        )
    unfused = [point for point in found if point["provider"] == "eager"]
    wrong = [p for p in unfused if (p["bound"] == "compute") != (p["intensity"] > RULE_OF_THUMB)]
    text = f"Of {len(unfused)} unfused measurements {len(wrong)} lie on the other side of that rule"
    if wrong:
        farthest = max(wrong, key=lambda p: max(p["intensity"] / RULE_OF_THUMB, RULE_OF_THUMB / p["intensity"]))
        text += (
            f", farthest {farthest['pattern']} {size_and_dtype(farthest)} {farthest['direction']}: "
            f"{farthest['intensity']:.3g} flops a byte, {farthest['bound']}-bound"
        )
    yield f"{text}."
