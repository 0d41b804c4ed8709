"""Endings of rows whose columns are on several ranks, as logits of a sharded vocabulary are.

Each rank makes numbers of its own columns: x [..., N], sharded in its columns, is taken as [ranks, ..., N / ranks],
sharded in its first dimension, of which each rank has rows to itself. All that crosses between ranks is what a whole
row's numbers are made of: logarithms of sums, numbers at targets, sums.

Where `linear` makes the columns, of a matrix that is sharded in its rows, each rank makes its own from all of x.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from onepass._arguments import sharding
from onepass.line import Line, parsed
from onepass.word import Word

__all__ = ["run"]

MADE_OF = {  # what each rank makes of its columns for an ending of whole rows, besides what is at targets
    "logsumexp": ("logsumexp",),
    "logprob": ("logsumexp",),
    "cross_entropy": ("logsumexp", "sum"),
    "entropy": ("logsumexp", "entropy"),
    "sum": ("sum",),
    "mean": ("sum",),
}
ABSENT = -1  # the target of a rank that has not got it


def run(line: Line, x: DTensor, operands: Sequence[Tensor], generator: torch.Generator | None, call: Callable):
    """Calls a line of DTensors by `call.call`, which hands itself over."""
    dim = _shared_along(line, x, operands)
    if dim is None:
        dim = _made_along(line, x, operands)
        if dim is not None:
            return _of_product(line, x, operands, dim, call)
        return sharding.run(line, x, operands, generator, call)
    line._check_shapes(x, operands)
    endings, with_target, made, words = _of_each_rank(line)
    columns = _Columns(x.device_mesh, dim, x.dim(), x.shape[-1])
    others = operands[: len(operands) - len(with_target)]
    targets = operands[len(others) :]
    given = [columns.of(o) for o in (x, *others)]
    given += [columns.of_target(t, int(word.parameters[-1])) for t, word in zip(targets, with_target)]
    results = call(parsed(words), given[0], tuple(given[1:]), True, generator)
    first, *others = results if isinstance(results, tuple) else (results,)
    keeps = len(others) + 1 - len(made) - len(with_target)
    first, *further = columns.wholes(endings, made, [first, *others[keeps:]], targets)
    return (first, *map(columns.together, others[:keeps]), *further) if line.keeps else first


def _of_each_rank(line: Line) -> tuple[list[Word], list[Word], list[str], str]:
    """The endings; those with a target; what ranks make for them all, and the line of that."""
    before, endings = _parts(line)
    with_target = [word for word in endings if word.operand == "target"]
    made = list(dict.fromkeys(part for word in endings for part in MADE_OF[word.name]))
    return (
        endings,
        with_target,
        made,
        " | ".join([*map(str, before), *made, *[f"logprob({ABSENT})"] * len(with_target)]),
    )


def _made_along(line: Line, x: DTensor, operands: Sequence[Tensor]) -> int | None:
    """The mesh's dimension along which the rows of the matrix of `linear` are shared out evenly, where numbers are all
    that comes of them; else None."""
    if line.weight is None or line.scores or not all(line.numbers) or line.has_dropout or not x.numel():
        return None
    mesh, weight = x.device_mesh, operands[line.weight]
    if not all(isinstance(o, DTensor) and o.device_mesh == mesh for o in operands):
        return None
    along = [dim for dim, at in enumerate(weight.placements) if sharding.is_shard(at, 0)]
    before, endings = _parts(line)
    at = next(i for i, word in enumerate(line.words) if word.kind == "contraction")
    known = all(word.name in MADE_OF for word in endings) and sharding.is_elementwise(before[at + 1 :])
    plain = all(word.operand in ("none", "column", "matrix") for word in before)
    if len(along) != 1 or weight.shape[0] % mesh.size(along[0]) or not known or not plain:
        return None
    return along[0]


def _of_product(line: Line, x: DTensor, operands: Sequence[DTensor], dim: int, call: Callable):
    """Each rank has all of x, and its own rows of the matrix and numbers of columns behind it."""
    line._check_shapes(x, operands)
    endings, with_target, made, words = _of_each_rank(line)
    columns = _Columns(x.device_mesh, dim, x.dim(), operands[line.weight].shape[0])
    targets = operands[len(operands) - len(with_target) :]
    rows = columns.placements_of_rows(x)
    sums = tuple([Partial() if at.is_shard() else Replicate() for at in rows])
    placed, kinds = [rows], [sharding.kind_of(x.shape, columns.along(Partial(), rows))]
    for i, operand in enumerate(operands[: len(operands) - len(with_target)]):
        own = Shard(0) if i >= line.weight else Replicate()
        placed.append(columns.along(own, [Replicate()] * len(rows)))
        kinds.append(sharding.kind_of(operand.shape, columns.along(own if i >= line.weight else Partial(), sums)))
    given = [sharding.redistributed(t, at) for t, at in zip((x, *operands), placed)]
    local = sharding.Local.apply(kinds, *given)
    own_targets = [columns.own_target(t, int(w.parameters[-1]), rows) for t, w in zip(targets, with_target)]
    results = call(parsed(words), local[0], (*local[1:], *own_targets), True, None)
    numbers = results if isinstance(results, tuple) else (results,)
    apart = [columns.in_front(each, x.shape[:-1], rows) for each in numbers]
    first, *further = columns.wholes(endings, made, apart, targets)
    return (first, *further) if line.keeps else first


def _parts(line: Line) -> tuple[list[Word], list[Word]]:
    """The words before the endings, and the endings."""
    first = next((i for i, word in enumerate(line.words) if "gives_number" in word.properties), len(line.words))
    return line.words[:first], line.words[first:]


def _shared_along(line: Line, x: DTensor, operands: Sequence[Tensor]) -> int | None:
    """The mesh's dimension along which x's columns are shared out evenly, where the line has elementwise words and
    endings that ranks can put together; else None."""
    mesh = x.device_mesh
    along = [dim for dim, at in enumerate(x.placements) if sharding.is_shard(at, x.dim() - 1)]
    if len(along) != 1 or x.shape[-1] % mesh.size(along[0]) or not x.numel():
        return None
    before, endings = _parts(line)
    fits = sharding.is_elementwise(before) and endings and all(word.name in MADE_OF for word in endings)
    alike = all(isinstance(o, DTensor) and o.device_mesh == mesh for o in operands)
    return along[0] if fits and alike else None


class _Columns:
    """x's columns along a dimension of the mesh: each rank has its own as rows, of one dimension more, in front."""

    def __init__(self, mesh: DeviceMesh, dim: int, dims: int, columns: int) -> None:
        self.mesh, self.dim, self.dims, self.all = mesh, dim, dims, columns
        self.ranks = self.mesh.size(dim)
        self.count = self.all // self.ranks
        self.begin = self.mesh.get_local_rank(dim) * self.count

    def of(self, tensor: DTensor) -> DTensor:
        """x, or an operand: its columns are shared out as x's are; each rank has all of what has none."""
        last = tensor.dim() - 1
        shares = last >= 0 and tensor.shape[last] == self.all
        along, of_gradient = (Shard(last), Shard(last)) if shares else (Replicate(), Partial())
        at = self._placements(tensor, along, last)
        gradient = sharding.kind_of(tensor.shape, self.along(of_gradient, at))
        (local,) = sharding.Local.apply([gradient], sharding.redistributed(tensor, at))
        return self.in_front(local, tensor.shape[:-1] + (self.count,) if shares else tensor.shape, at, self.dims)

    def of_target(self, target: DTensor, ignored: int) -> DTensor:
        """Each rank's own targets, ABSENT where another has it, or none.

        Raises:
            IndexError: for a target that is no column, on the CPU; on CUDA a device-side assertion fails.
        """
        at = self._placements(target, Replicate(), self.dims - 1)
        return self.in_front(self.own_target(target, ignored, at), target.shape, at, self.dims - 1)

    def own_target(self, target: DTensor, ignored: int, at: sharding.Placements) -> Tensor:
        """The same of the rows that this rank has where targets are placed so."""
        local = sharding.redistributed(target, at).to_local()
        _check(local, (local == ignored) | ((local >= 0) & (local < self.all)))
        own = local - self.begin
        return torch.where((own >= 0) & (own < self.count), own, ABSENT)

    def placements_of_rows(self, x: DTensor) -> sharding.Placements:
        """x is to be whole along the columns' dimension, and stays sharded in its rows."""
        return self._placements(x, Replicate(), self.dims - 1)

    def wholes(
        self, endings: Sequence[Word], made: list[str], numbers: list[DTensor], targets: Sequence[DTensor]
    ) -> tuple[DTensor, ...]:
        """Endings of whole rows, from the numbers that ranks have made, those at targets last."""
        found = self.gathered(numbers)
        wholes = _Wholes(dict(zip(made, found)), self.all)
        at_targets = zip(found[len(made) :], map(self.targets, targets))
        return self.of_rows([wholes.of(w, *(next(at_targets) if w.operand == "target" else ())) for w in endings])

    def gathered(self, numbers: list[DTensor]) -> tuple[Tensor, ...]:
        """Of each rank's numbers [ranks, ...], those of all ranks, of the rows that this one has."""
        stacked = torch.stack(numbers, -1)
        at = self.along(Replicate(), stacked.placements)
        (local,) = sharding.Local.apply([sharding.kind_of(stacked.shape, at)], sharding.redistributed(stacked, at))
        self.rows, self.rows_at = stacked.shape[1:-1], [Shard(p.dim - 1) if p.is_shard() else p for p in at]
        return local.unbind(-1)

    def targets(self, target: DTensor) -> Tensor:
        """Of the rows that this rank has."""
        return sharding.redistributed(target, tuple(self.rows_at)).to_local()

    def of_rows(self, numbers: list[Tensor]) -> tuple[DTensor, ...]:
        """A number for each row, which all ranks have made."""
        return sharding.Whole.apply(self.mesh, [sharding.kind_of(self.rows, self.rows_at)] * len(numbers), *numbers)

    def together(self, kept: DTensor) -> DTensor:
        """Of each rank's columns [ranks, ..., N / ranks] the whole rows' [..., N]."""
        (local,) = sharding.Local.apply([sharding.kind_of(kept.shape, kept.placements)], kept)
        at = [Shard(p.dim - 1) if p.is_shard() else p for p in kept.placements]
        kind = sharding.kind_of(torch.Size((*kept.shape[1:-1], self.all)), self.along(Shard(self.dims - 1), at))
        return sharding.Whole.apply(self.mesh, [kind], local[0])[0]

    def along(self, own: Placement, placements: Sequence[Placement]) -> sharding.Placements:
        return tuple([own if i == self.dim else at for i, at in enumerate(placements)])

    def _placements(self, tensor: DTensor, own: Placement, rows: int) -> sharding.Placements:
        """Where a tensor is to be: sharded in its first dimensions, those of rows, as it is, and nowhere a sum."""
        stays = [
            at if any(sharding.is_shard(at, row) for row in range(rows)) else Replicate() for at in tensor.placements
        ]
        return self.along(own, stays)

    def in_front(self, local: Tensor, shape: torch.Size, at: sharding.Placements, dims: int | None = None) -> DTensor:
        """A tensor with a dimension of ranks before its `dims`; what it lacks is 1."""
        dims = len(shape) if dims is None else dims
        more = 1 + dims - len(shape)
        moved = [Shard(p.dim + more) if p.is_shard() else p for p in at]
        kind = sharding.kind_of(torch.Size((self.ranks, *[1] * (more - 1), *shape)), self.along(Shard(0), moved))
        return sharding.Whole.apply(self.mesh, [kind], local[(None,) * more])[0]


def _check(target: Tensor, fits: Tensor) -> None:
    if fits.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(fits.all())
    elif not fits.all():
        raise IndexError(f"Target {target[~fits][0].item()} is out of bounds.")


@dataclass(frozen=True)
class _Wholes:
    """Endings of whole rows. made: numbers [ranks, ...] of each rank's columns; columns: of all ranks."""

    made: dict[str, Tensor]
    columns: int

    @functools.cached_property
    def log_sum(self) -> Tensor:
        return torch.logsumexp(self.made["logsumexp"], 0)

    def of(self, word: Word, log_at_target: Tensor | None = None, target: Tensor | None = None) -> Tensor:
        """An ending; log_at_target: of each rank with its own sum of exponentials, and 0 where the target is absent."""
        if target is not None:
            return self._of_target(word, log_at_target, target)
        if word.name == "logsumexp":
            return self.log_sum
        if word.name == "entropy":
            shares = (self.made["logsumexp"] - self.log_sum).exp()
            expected = self.made["logsumexp"] - self.made["entropy"]
            return self.log_sum - (shares * expected.where(shares > 0, 0.0)).sum(0)
        total = self.made["sum"].sum(0)
        return total / self.columns if word.name == "mean" else total

    def _of_target(self, word: Word, log_at_target: Tensor, target: Tensor) -> Tensor:
        own = self.made["logsumexp"]
        at_target = torch.where(own == -math.inf, own, log_at_target + own)
        owner = target.clamp(0, self.columns - 1).long() // (self.columns // own.shape[0])
        at_target = at_target.gather(0, owner[None])[0]
        *numbers, ignored = word.parameters
        if word.name == "logprob":
            result = at_target - self.log_sum
        else:
            smoothing, z_loss = numbers
            result = self.log_sum - (1 - smoothing) * at_target
            if smoothing:
                result = result - smoothing / self.columns * self.made["sum"].sum(0)
            if z_loss:
                result = result + z_loss * self.log_sum.square()
        return result.where(target != int(ignored), 0.0)
