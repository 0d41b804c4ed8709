"""What `onepass.explain` found: tables, JSON, a roofline, and a measurement beside the prediction."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.table import Column, Table

from onepass._printed import Printed
from onepass.advice.measure import Measured, measure
from onepass.advice.plot import roofline
from onepass.pricing.prices import Price
from onepass.pricing.profile import Profile

__all__ = ["Advice", "Explanation", "Operator"]


SUMS = "sum of gradients"
"""Where a tensor is used twice. Of what no line takes part in, they are not counted."""


@dataclass(frozen=True)
class Operator:
    """One operator of the model as PyTorch runs it; `line` is the one that could do it."""

    name: str
    shape: tuple[int, ...]
    forward: Price
    backward: Price
    bound: str
    """"memory", "compute" or "launch"."""
    why: str
    line: str | None


@dataclass(frozen=True)
class Advice:
    """One line that could be: prices (forward, backward) of the operators now and of the line, bytes saved for backward
    by both, and the reason."""

    line: str
    shape: tuple[int, ...]
    dtype: str
    now: tuple[Price, Price]
    fused: tuple[Price, Price]
    saved_bytes: tuple[int, int]
    why: str


@dataclass
class Explanation(Printed):
    """All operators of a model, and all lines that would stand for some of them."""

    profile: Profile
    training: bool = False
    operators: list[Operator] = field(default_factory=list)
    lines: list[Advice] = field(default_factory=list)

    @property
    def seconds(self) -> tuple[float, float]:
        """Of the device, forward and backward together: now, and with all lines."""
        now = sum(o.forward.seconds + o.backward.seconds for o in self.operators)
        gained = sum(
            sum(price.seconds for price in line.now) - sum(price.seconds for price in line.fused) for line in self.lines
        )
        return now, now - gained

    @property
    def elementwise(self) -> tuple[float, float]:
        """Seconds of the operators that multiply no matrices, forward and backward together: of all of them, and of
        those that lines do. Sums of gradients, which are known of lines alone, are in neither."""
        counted = [o for o in self.operators if o.name != SUMS and not o.forward.computing + o.backward.computing]
        seconds = [(o.forward.seconds + o.backward.seconds, o.line is not None) for o in counted]
        return sum(s for s, _ in seconds), sum(s for s, in_line in seconds if in_line)

    @property
    def bytes(self) -> tuple[float, float]:
        """Of memory-bound operators and small ones, now and with all lines."""
        moved = [o for o in self.operators if o.bound != "compute"]
        now = sum(o.forward.bytes + o.backward.bytes for o in moved)
        gained = sum(sum(p.bytes for p in line.now) - sum(p.bytes for p in line.fused) for line in self.lines)
        return now, now - gained

    def to_json(self) -> str:
        """All of it."""
        told = {
            "device": self.profile.name,
            "training": self.training,
            "seconds": self.seconds,
            "elementwise_seconds": self.elementwise,
            "bytes": self.bytes,
            "lines": [asdict(line) for line in self.lines],
            "operators": [asdict(operator) for operator in self.operators],
        }
        return json.dumps(told, indent=1)

    def __rich__(self) -> Group:
        now, fused = self.seconds
        moved, left = self.bytes
        launches = sum(o.forward.kernels + o.backward.kernels for o in self.operators)
        host = sum(o.forward.host_seconds + o.backward.host_seconds for o in self.operators)
        passes = "forward and backward" if self.training else "forward"
        said = f"{self.profile.name}, {passes}: {1e3 * now:,.3g} ms of kernels now, {1e3 * fused:,.3g} ms with lines"
        if now:
            said += f" ({now / max(fused, 1e-12):.2f} times as fast)"
        said += f"; {moved / 1e6:,.0f} MB moved by what is not compute-bound, {left / 1e6:,.0f} MB with lines."
        if host > now:
            said += f" {launches} launches take the host {1e3 * host:,.3g} ms: the model is launch-bound."
        return Group(self._table_of_lines(), self._table_of_others(), said)

    def _table_of_lines(self) -> Table:
        table = Table(
            Column("line", overflow="fold"),
            *(Column(name, justify="right") for name in ("times", "µs forward", "µs backward", "MB", "saved MB")),
            Column("why", overflow="fold"),
            title="worth a line",
        )
        groups: dict[tuple, list[Advice]] = defaultdict(list)
        for line in self.lines:
            groups[line.line, line.shape, line.dtype].append(line)
        for (text, shape, dtype), alike in groups.items():
            one = alike[0]
            sides = [f"{1e6 * a.seconds:,.3g} → {1e6 * b.seconds:,.3g}" for a, b in zip(one.now, one.fused)]
            moved = [sum(p.bytes for p in side) / 1e6 for side in (one.now, one.fused)]
            table.add_row(
                f"{text}\n[dim]{'x'.join(map(str, shape))} {dtype}[/dim]",
                str(len(alike)),
                sides[0],
                sides[1] if self.training else "",
                f"{moved[0]:,.3g} → {moved[1]:,.3g}",
                f"{one.saved_bytes[0] / 1e6:,.3g} → {one.saved_bytes[1] / 1e6:,.3g}" if self.training else "",
                one.why,
            )
        return table

    def _table_of_others(self) -> Table:
        table = Table("operator", *(Column(n, justify="right") for n in ("times", "µs", "share")), "why not")
        table.title = "left alone"
        now = self.seconds[0]
        groups: dict[tuple, list[Operator]] = defaultdict(list)
        for operator in self.operators:
            if operator.line is None:
                groups[operator.name, operator.why].append(operator)
        spent = {key: sum(o.forward.seconds + o.backward.seconds for o in alike) for key, alike in groups.items()}
        for key in sorted(spent, key=spent.get, reverse=True)[:12]:
            share = f"{100 * spent[key] / now:.0f} %" if now else ""
            table.add_row(key[0], str(len(groups[key])), f"{1e6 * spent[key]:,.4g}", share, self._why_not(key, groups))
        return table

    def _why_not(self, key: tuple[str, str], groups) -> str:
        said = key[1]
        if said.startswith("memory"):
            said += ": no chain of words begins or ends here, or a line would not be faster"
        return said

    def plot(self, path: Path | str) -> None:
        """Draws a roofline: operators as they are, and the lines in their place.

        Raises:
            ModuleNotFoundError: without matplotlib.
        """
        roofline(self, Path(path))

    def measure(self, seconds: float = 0.2) -> list[Measured]:
        """Times each distinct line, and what it stands for in plain PyTorch, on the device that the explanation is
        about, and prints both beside the prediction.

        Raises:
            RuntimeError: where no such device is.
        """
        found = measure(self, seconds)
        table = Table(
            Column("line", overflow="fold"),
            *(Column(n, justify="right") for n in ("", "predicted µs", "measured µs", "unfused µs")),
        )
        for row in found:
            for i, side in enumerate(("forward", "backward") if self.training else ("forward",)):
                times = (f"{1e6 * row.predicted[i]:,.3g}", f"{1e6 * row.measured[i]:,.3g}")
                table.add_row("" if i else row.line, side, *times, f"{1e6 * row.unfused[i]:,.3g}")
        Console().print(table)
        return found
