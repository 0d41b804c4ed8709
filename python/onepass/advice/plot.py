"""A roofline: what a device can do at an arithmetic intensity, the operators of a model, and the lines instead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from onepass.pricing.prices import Price

if TYPE_CHECKING:
    from onepass.advice.report import Explanation

__all__ = ["roofline"]


def roofline(explained: Explanation, path: Path) -> None:
    """Flops a second over flops a byte, both logarithmic; a point's area is its share of the time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    profile = explained.profile
    figure, axes = plt.subplots(figsize=(8, 5))
    peak = max(profile.products.values())
    ridge = peak / profile.bandwidth
    intensities = [2**-5, ridge, 64 * ridge]
    axes.plot(intensities, [min(peak, i * profile.bandwidth) for i in intensities], color="black", label="roof")
    total = explained.seconds[0] or 1.0
    now = [(o.forward + o.backward, o.line is not None) for o in explained.operators]
    groups = (
        ("operators left alone", "#888888", [p for p, in_line in now if not in_line]),
        ("operators now", "#d62728", [p for p, in_line in now if in_line]),
        ("lines", "#1f77b4", [sum(a.fused, Price()) for a in explained.lines]),
    )
    for name, color, points in groups:
        points = [p for p in points if p.bytes and p.seconds]
        axes.scatter(
            [max(p.flops / p.bytes, 2**-5) for p in points],
            [max(p.flops, 1.0) / p.seconds for p in points],
            [12 + 600 * p.seconds / total for p in points],
            color=color,
            alpha=0.6,
            label=name,
        )
    axes.set(xscale="log", yscale="log", xlabel="flops a byte", ylabel="flops a second", title=profile.name)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
