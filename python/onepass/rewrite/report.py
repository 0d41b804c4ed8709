"""What was fused in a model, and what that is predicted to save."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field

from rich.table import Column, Table
from torch import fx

from onepass._printed import Printed
from onepass.graph.operations import operation, sizes, value_of
from onepass.pricing.prices import Price
from onepass.pricing.profile import Profile
from onepass.rewrite import prices
from onepass.rewrite.find.chains import Chain
from onepass.rewrite.groups import Groups
from onepass.rewrite.heads import Head

__all__ = ["Fused", "Report"]


@dataclass(frozen=True)
class Fused:
    """One place in a graph: the line, and what it takes there before and after, forward and backward together.

    Attributes:
        line: what stands there now.
        shape, dtype: of its result.
        operators: how many there were.
        bytes, kernels, seconds: before and after; predicted, the numbers by which the line was chosen. What is done
            beside it as well, such as the matrix products of attention, is not among them.
    """

    line: str
    shape: tuple[int, ...]
    dtype: str
    operators: int
    bytes: tuple[float, float] = (0.0, 0.0)
    kernels: tuple[int, int] = (0, 0)
    seconds: tuple[float, float] = (0.0, 0.0)

    @staticmethod
    def of(chain: Chain, profile: Profile, training: bool) -> Fused:
        """A chain, as it was decided."""
        operators = [
            node
            for node in chain.nodes
            if (op := operation(node)) is None or op.name not in ("same", "view", "permuted")
        ]
        return Fused._of(chain.line, chain.result, len(operators), *prices.decision(chain, profile, training))

    @staticmethod
    def of_head(head: Head, profile: Profile, training: bool, nested: bool) -> Fused:
        """A loss, with its head where it has one."""
        totals = (sum(price, Price()) for price in prices.of_head(head, profile, training, nested))
        return Fused._of(head.function.__name__, head.loss, len(head.nodes), *totals)

    @staticmethod
    def of_groups(groups: Groups, profile: Profile, training: bool) -> Fused:
        """A group normalisation."""
        totals = (sum(price, Price()) for price in prices.of_groups(groups, profile, training))
        return Fused._of(groups.line, groups.result, len(groups.nodes), *totals)

    @staticmethod
    def of_call(node: fx.Node) -> Fused:
        """This package's attention in the place of PyTorch's."""
        return Fused._of(node.target.__name__, node, 1)

    @staticmethod
    def _of(line: str, result: fx.Node, operators: int, *costs: Price) -> Fused:
        """costs: before and after, where they are known."""
        value = value_of(result)
        numbers = [tuple(getattr(price, name) for price in costs) for name in ("bytes", "kernels", "seconds")]
        return Fused(
            line, sizes(value), str(value.dtype).removeprefix("torch."), operators, *(numbers if costs else ())
        )


@dataclass
class Report(Printed):
    """All graphs that were captured: how many nodes each had, and what was fused in it."""

    nodes: list[int] = field(default_factory=list)
    graphs: list[list[Fused]] = field(default_factory=list)

    def add(self, nodes: int, fused: list[Fused]) -> None:
        """One more graph."""
        self.nodes.append(nodes)
        self.graphs.append(fused)

    @property
    def lines(self) -> list[Fused]:
        """Of all graphs."""
        return [fused for graph in self.graphs for fused in graph]

    def to_json(self) -> str:
        """All there is."""
        graphs = [{"nodes": n, "lines": [asdict(f) for f in fused]} for n, fused in zip(self.nodes, self.graphs)]
        return json.dumps({"graphs": graphs}, indent=1)

    def __rich__(self) -> Table:
        table = Table(
            Column("line", overflow="fold"),
            *(Column(name, justify="right") for name in ("times", "operators", "MB", "kernels", "µs predicted")),
            title=f"{sum(self.nodes)} nodes in {len(self.nodes)} graphs",
        )
        if not self.nodes:
            table.caption = "nothing yet: a model is captured when it is called"
        elif not self.lines:
            table.caption = "nothing was fused: no chain was predicted to be faster as a line"
        for (line, shape, dtype), count in Counter((f.line, f.shape, f.dtype) for f in self.lines).items():
            fused = next(f for f in self.lines if (f.line, f.shape, f.dtype) == (line, shape, dtype))
            table.add_row(
                f"{line}\n[dim]{'x'.join(map(str, shape))} {dtype}[/dim]",
                str(count),
                str(fused.operators),
                _both(fused.bytes, 1e-6),
                _both(fused.kernels, 1),
                _both(fused.seconds, 1e6),
            )
        return table


def _both(pair: tuple[float, float], unit: float) -> str:
    return f"{pair[0] * unit:,.3g} → {pair[1] * unit:,.3g}" if any(pair) else ""
