"""A line of DTensors: which placements it takes them in, and what each rank runs on its own part.

Rows may be sharded in every line, for no row looks at another: operands without rows are then replicated, and their
gradients are partial sums. A line of elementwise words may be sharded within its rows, together with its columns. With
`linear` a matrix stays where it is: sharded by its features it gives a result sharded likewise, sharded by its columns
a partial sum. Whatever else comes is redistributed first, to be replicated where nothing better is known.

A line runs on local tensors and autograd is inside of that, so statistics and products saved for backward never are
DTensors, and need no placement that would be true of them. (A sharding strategy of each operator, which
`register_sharding` asks for, has one placement for all tensors of a list and none for what differs from rank to rank,
as the state of dropout does.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from onepass._arguments.remembered import remembered
from onepass.line import Line, parsed

__all__ = ["Kind", "Local", "Placements", "Whole", "is_elementwise", "is_shard", "kind_of", "redistributed", "run"]

Placements = tuple[Placement, ...]  # along each dimension of a mesh
Kind = tuple[torch.Size, tuple[int, ...], Placements]  # shape and strides of the whole, and where it lies


@dataclass(frozen=True)
class Given:
    """What is known of a DTensor before it is looked at."""

    shape: torch.Size
    placements: Placements

    def dim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Layout:
    """Along one dimension of the mesh.

    inputs, gradients: placements of x, then of the operands, and of their gradients as a rank makes them.
    result: of the result and of what is kept behind the contraction. kept: of what is kept before it.
    """

    inputs: list[Placement]
    gradients: list[Placement]
    result: Placement
    kept: Placement


@dataclass(frozen=True)
class Plan:
    """Of a call. in_two: the line's halves, if ranks must add up what the first gives.

    inputs: placements of x and of each operand. gradients: what their gradients are. shares: among how many ranks a
    bias behind a sum over ranks is divided. shard: which part of what is dropped this rank holds.
    """

    in_two: tuple[str, str] | None
    inputs: list[Placements]
    gradients: list[Kind]
    shares: int
    shard: int
    results: list[Kind]


class Parts:
    """The words before and behind a line's contraction; without one, all are before it."""

    def __init__(self, line) -> None:
        self.at = next((i for i, word in enumerate(line.words) if word.kind == "contraction"), len(line.words))
        self.before, self.behind = line.words[: self.at], line.words[self.at + 1 :]
        self.keeps_before = sum(word.kind == "keep" for word in self.before)
        self.draws_before, self.draws_behind = (
            any(word.kind == "dropout" for word in words) for words in (self.before, self.behind)
        )


def run(line: Line, x: DTensor, operands: Sequence[Tensor], generator: torch.Generator | None, call: Callable):
    """Calls a line on the parts that this rank holds, by `call.call`, which hands itself over.

    Dropout: every rank draws the same state, as DTensor's random operators have it where ranks are seeded alike, and
    adds to its offset which part of what is dropped it holds. So masks agree where that is replicated, and differ
    where it is sharded.
    """
    mesh = x.device_mesh
    if not all([isinstance(o, DTensor) and o.device_mesh == mesh for o in operands]):
        _raise_mixed(line, x, operands)
    tensors = (x, *operands)
    plan = _plan(line, mesh, tuple([Given(t.shape, t.placements) for t in tensors]))
    if plan.in_two:
        return _in_two(line, plan.in_two, x, operands, generator, call)
    local = Local.apply(plan.gradients, *map(redistributed, tensors, plan.inputs))
    if plan.shares > 1:
        local = [t / plan.shares if line.is_behind(i - 1) else t for i, t in enumerate(local)]
    results = call(line, local[0], tuple(local[1:]), True, generator, shard=plan.shard)
    wrapped = Whole.apply(mesh, plan.results, *(results if line.keeps else [results]))
    return wrapped if line.keeps else wrapped[0]


def _raise_mixed(line, x: DTensor, operands: Sequence[Tensor]) -> None:
    line._check_tensors(x, operands)
    for name, operand in zip(line._operand_names(), operands):
        if not isinstance(operand, DTensor):
            raise RuntimeError(
                f"fused(): got mixed torch.Tensor and DTensor: expected {name} to be DTensor as x is, got "
                f"{type(operand).__name__}"
            )
        if operand.device_mesh != x.device_mesh:
            raise RuntimeError(f"fused(): expected {name} to be on x's {x.device_mesh}, got {operand.device_mesh}")


def redistributed(tensor: DTensor, placements: Placements) -> DTensor:
    if tensor.placements == placements:
        return tensor
    placed = tensor.redistribute(placements=placements)
    if not placed.requires_grad or torch.compiler.is_compiling():
        return placed
    return _WholeGradient.apply(placed) if any([at.is_partial() for at in tensor.placements]) else placed


class _WholeGradient(torch.autograd.Function):
    """Of a sum over ranks, which is everywhere now: torch 2.10 takes a gradient that is a sum, too, for whole."""

    @staticmethod
    def forward(ctx, tensor: DTensor) -> DTensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: DTensor) -> DTensor:
        return redistributed(gradient, _of_gradient(gradient.placements))


def _locals(tensors: Sequence[DTensor]) -> list[Tensor]:
    return [t.to_local().detach() for t in tensors]


def _wholes(mesh: DeviceMesh, kinds: list[Kind], local: Sequence[Tensor]) -> list[DTensor]:
    if torch.compiler.is_compiling():
        return [_from_local(t, mesh, kind) for t, kind in zip(local, kinds)]
    return [DTensor(t, _spec(mesh, kind, t.dtype), requires_grad=False) for t, kind in zip(local, kinds)]


def _from_local(local: Tensor, mesh: DeviceMesh, kind: Kind) -> DTensor:
    shape, stride, placements = kind
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


_SPECS: dict[tuple[int, Kind, torch.dtype], object] = {}


def _spec(mesh: DeviceMesh, kind: Kind, dtype: torch.dtype):
    """What makes a DTensor of a local tensor. `DTensor.from_local` finds it out each time, for half of a call's time on
    the host."""
    key = id(mesh), kind, dtype  # a mesh is equal to one of process groups that are gone; the spec keeps this one alive
    spec = _SPECS.get(key)
    if spec is None:
        if len(_SPECS) >= 4096:
            _SPECS.clear()
        spec = _SPECS[key] = _from_local(torch.empty((), dtype=dtype, device=mesh.device_type), mesh, kind)._spec
    return spec


class Local(torch.autograd.Function):
    """`DTensor.to_local` of all inputs at once; kinds: of their gradients. to_local's own backward takes the host three
    times as long, and in torch 2.11 has no derivative. The inverse of `Whole`."""

    @staticmethod
    def forward(ctx, kinds: list[Kind], *tensors: DTensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.kinds = tensors[0].device_mesh, kinds
        local = _locals(tensors)
        ctx.mark_non_differentiable(*[t for t, needed in zip(local, ctx.needs_input_grad[1:]) if not needed])
        return tuple(local)

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple[DTensor | None, ...]:
        def whole(given: list[Tensor], kinds: list[Kind]) -> Sequence[DTensor]:
            given = [g.contiguous() for g in given]
            return Whole.apply(ctx.mesh, kinds, *given) if _is_differentiated() else _wholes(ctx.mesh, kinds, given)

        return None, *_where_given(gradients, whole, ctx.kinds)


class Whole(torch.autograd.Function):
    """`DTensor.from_local` of all results at once."""

    @staticmethod
    def forward(ctx, mesh: DeviceMesh, kinds: list[Kind], *local: Tensor) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.kinds = kinds
        return tuple(_wholes(mesh, kinds, [t.detach() for t in local]))

    @staticmethod
    def backward(ctx, *gradients: DTensor | None) -> tuple[Tensor | None, ...]:
        def local(given: list[DTensor], kinds: list[Kind]) -> Sequence[Tensor]:
            placed = [redistributed(g, _of_gradient(at)) for g, (_, _, at) in zip(given, kinds)]
            return Local.apply(kinds, *placed) if _is_differentiated() else _locals(placed)

        return None, None, *_where_given(gradients, local, ctx.kinds)


def _is_differentiated() -> bool:
    """Whether a backward shall have a derivative; Dynamo traces backward without."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _of_gradient(placements: Placements) -> Placements:
    """Every rank's summand has the whole gradient."""
    return tuple([Replicate() if at.is_partial() else at for at in placements])


def _where_given(gradients: Sequence[Tensor | None], function, each: Sequence) -> list[Tensor | None]:
    """A function of those gradients that there are, and of what belongs to each."""
    there = [i for i, gradient in enumerate(gradients) if gradient is not None]
    found: list[Tensor | None] = [None] * len(gradients)
    for i, value in zip(there, function([gradients[i] for i in there], [each[i] for i in there]) if there else ()):
        found[i] = value
    return found


def _in_two(line: Line, texts: tuple[str, str], x: DTensor, operands: Sequence[DTensor], generator, call: Callable):
    count = line.weight + 1
    product = call(parsed(texts[0]), x, operands[:count], True, generator)
    product, *before = product if isinstance(product, tuple) else [product]
    result = call(parsed(texts[1]), product, operands[count:], True, generator)
    result, *behind = result if isinstance(result, tuple) else [result]
    return (result, *before, *behind) if line.keeps else result


@remembered
def _plan(line, mesh: DeviceMesh, tensors: tuple[Given, ...]) -> Plan:
    x, *operands = tensors
    line._check_shapes(x, operands)  # a rank sees its own parts only
    parts = Parts(line)
    layouts = [_layout(line, parts, x, operands, dim) for dim in range(mesh.ndim)]
    sums = [dim for dim, layout in enumerate(layouts) if layout.result.is_partial()]
    in_two = None
    if sums and any([not word.is_bias for word in parts.behind]):
        in_two = (
            " | ".join([str(word) for word in line.words[: parts.at + 1]]),
            " | ".join([str(word) for word in parts.behind]),
        )
    return Plan(
        in_two,
        [tuple([layout.inputs[i] for layout in layouts]) for i in range(len(tensors))],
        [kind_of(t.shape, [layout.gradients[i] for layout in layouts]) for i, t in enumerate(tensors)],
        math.prod([mesh.size(dim) for dim in sums]),
        _shard(mesh, [layout.inputs[0] if parts.draws_before else layout.result for layout in layouts]),
        _results(line, parts, x, operands, layouts),
    )


def _shard(mesh: DeviceMesh, drawn: list[Placement]) -> int:
    """The number of this rank's part of a tensor so placed: one for all ranks that hold the same."""
    number = 0
    for dim, placement in enumerate(drawn):
        if placement.is_shard():
            number = number * mesh.size(dim) + mesh.get_local_rank(dim)
    return number


def _results(line, parts: Parts, x: Given, operands: Sequence[Given], layouts: list[Layout]):
    shape = behind = x.shape if line.weight is None else line.shape_behind(x, operands)
    if line.values:
        shape = torch.Size((*behind[:-1], operands[-1].shape[-1]))
    placements, kept = [layout.result for layout in layouts], [layout.kept for layout in layouts]
    kinds = [(shape, placements), *[(x.shape, kept)] * parts.keeps_before]
    kinds += [(behind, placements)] * (1 + line.keeps - len(kinds))
    own = [
        (*of[:-1], of[-1] // line.group if line.group else 1) if is_scale else of[:-1] if is_number else of
        for (of, _), is_number, is_scale in zip(kinds, line.numbers, line.scales)
    ]
    return [kind_of(torch.Size(of), at) for of, (_, at) in zip(own, kinds)]


def kind_of(shape: torch.Size, placements: list[Placement]) -> Kind:
    """Of a contiguous tensor."""
    strides = [math.prod([max(n, 1) for n in shape[i + 1 :]]) for i in range(len(shape))]
    return shape, tuple(strides), tuple(placements)


def _layout(line, parts: Parts, x: Given, operands: Sequence[Given], dim: int) -> Layout:
    if line.weight is not None and not line.scores:
        matrix, last = operands[line.weight].placements[dim], x.dim() - 1
        apart = not parts.keeps_before and not (parts.draws_before and parts.draws_behind)
        if is_shard(matrix, 0) and is_elementwise(parts.behind) and apart:
            return _by_features(line, x, operands)
        if (is_shard(matrix, 1) or is_shard(x.placements[dim], last)) and is_elementwise(parts.before):
            return _by_columns(line, x, operands)
    for at in _sharded_dimensions(line, x, operands, dim):
        if _may_be_sharded(line, x.dim(), at):
            placed = [_operand_placed(line, i, o, x.shape, at) for i, o in enumerate(operands)]
            return Layout(*_transposed([(Shard(at), Shard(at)), *placed]), Shard(at), Shard(at))
    alike = [Replicate()] * (1 + len(operands))
    return Layout(alike, alike, Replicate(), Replicate())


def is_shard(placement: Placement, dim: int) -> bool:
    return type(placement) is Shard and placement.dim == dim  # its subclasses deal rows out in another order


def is_elementwise(words) -> bool:
    """Whether no number's result depends on another, or on its column."""
    whole, sees_others = ("row", "rotary", "contraction"), {"is_causal", "by_groups", "by_channels"}
    return all(word.kind not in whole and not sees_others & {*word.properties} for word in words)


def _may_be_sharded(line, dims: int, at: int) -> bool:
    if at == dims - 1:
        return is_elementwise(line.words)
    return at < dims - 2 or not line.looks_at_rows


def _sharded_dimensions(line, x: Given, operands: Sequence[Given], dim: int) -> list[int]:
    """Dimensions of x in which it is sharded, or could be as an operand is."""
    found = [at for at in range(x.dim()) if is_shard(x.placements[dim], at)]
    for i, operand in enumerate(operands):
        for at in range(x.dim()):
            own, _ = _operand_placed(line, i, operand, x.shape, at)
            if own.is_shard() and is_shard(operand.placements[dim], own.dim):
                found.append(at)
    return found


def _operand_placed(line, i: int, operand: Given, shape: torch.Size, at: int) -> tuple[Placement, Placement]:
    """Of an operand and its gradient, where what it meets is sharded in a dimension of its shape."""
    kind, dims = line._operand_words[i].operand, len(shape)
    if kind == "target":
        return (Shard(at), Shard(at)) if at < dims - 1 else (Replicate(), Partial())
    shares_rows = kind != "matrix" and (kind not in ("keys", "values") or at < dims - 2)
    own = at - dims + operand.dim()
    if shares_rows and 0 <= own and operand.shape[own] == shape[at]:
        return Shard(own), Shard(own)
    return Replicate(), Partial()


def _by_features(line, x: Given, operands: Sequence[Given]) -> Layout:
    """Each rank makes some of the numbers that `linear` gives, of whole rows."""
    shape = line.shape_behind(x, operands)
    behind = range(line.weight + 1, len(operands))
    placed = [
        *[(Replicate(), Partial())] * (1 + line.weight),
        (Shard(0), Shard(0)),
        *[_operand_placed(line, i, operands[i], shape, len(shape) - 1) for i in behind],
    ]
    return Layout(*_transposed(placed), Shard(len(shape) - 1), Replicate())


def _by_columns(line, x: Given, operands: Sequence[Given]) -> Layout:
    """Each rank adds up some columns of x, and of the matrix."""
    last = x.dim() - 1
    placed = [
        (Shard(last), Shard(last)),
        *[_operand_placed(line, i, operands[i], x.shape, last) for i in range(line.weight)],
        (Shard(1), Shard(1)),
        *[(Replicate(), Partial())] * (len(operands) - line.weight - 1),
    ]
    return Layout(*_transposed(placed), Partial(), Shard(last))


def _transposed(placed) -> tuple[list[Placement], list[Placement]]:
    return [own for own, _ in placed], [of_gradient for _, of_gradient in placed]
