"""A line's backward operator in PyTorch's own terms, from what it reads: what second derivatives are taken of."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from onepass import _native
from onepass._arguments.shapes import sizes_of_sum, sum_of_neighbours
from onepass.reference import IN_TORCH, compose, of_columns

OF_DTYPE = {code: dtype for dtype, code in _native.DTYPES.items()}


def like_x(line: str, gradients: Sequence[Tensor], x: Tensor | None, *resumed: Tensor | None) -> Tensor:
    """What has x's leading dimensions in backward, of those tensors that it is given; without a contraction, x's shape
    and dtype."""
    if not _native.describe(line)["numbers"][0]:
        return gradients[0]
    return next(t for t in (x, *resumed) if t is not None)  # backward of an ending reads one of them


class Saved(NamedTuple):
    """What a line's forward leaves for its backward by these operators, None where it is not read."""

    x: Tensor | None
    resumed: Tensor | None
    dropout_state: Tensor | None
    product: Tensor | None
    resumed_behind: Tensor | None
    operands: tuple[Tensor | None, ...]


class _Part(NamedTuple):
    """Words from a value that was saved (or, where nothing reads it, zeros in its place) to the next that was."""

    begin: int
    end: int
    value: Tensor


def composed_backward(
    line, gradients: Sequence[Tensor], saved: Saved, types: Sequence[int], wanted: int, first_row: int = 0
) -> tuple[Tensor, ...]:
    """What the backward operator writes, as a differentiable function of its tensors.

    It begins where the operator does, so what is not saved has no influence. The statistics, and what a contraction
    gives, are made again: they have no graph of their own.

    Raises:
        RuntimeError: where what a contraction gives was saved in the place of what it is made of.
    """
    if (part := line.differentiable_part) is not line:  # codes have no gradient
        count = part.operand_count
        saved, types = saved._replace(operands=saved.operands[:count]), types[: 1 + count]
        return composed_backward(part, gradients[: 1 + part.keeps], saved, types, wanted, first_row)
    if cannot_be_made_again(line, saved):
        refuse_twice(line)
    # Within `torch.func.jacrev` of `grad`, tensors that are taken as they are leave their level.
    gradients, saved = tree_map_only(Tensor, lambda t: t.view_as(t), (tuple(gradients), saved))
    before, behind = _shapes(line, gradients, saved)
    dtype = OF_DTYPE[types[0] % _native.BROADCAST] if line.weight is None else None
    operands = []
    for i, operand in enumerate(saved.operands):
        shape = behind if line.is_behind(i) else before
        is_tensor = (
            i in line.tensor_operands or i in line.column_operands and types[1 + i] % _native.UNIT >= _native.BROADCAST
        )
        if i in line.target_operands or i in line.table_operands:
            operands.append(operand)
            continue
        if i in line.channel_operands and operand is not None:  # its gradient is that of columns
            operand = of_columns(operand, shape[-1])  # noqa: PLW2901
        own = shape if is_tensor else shape[-1:]
        filled = _zeros(own, types[1 + i], gradients[0]) if operand is None else operand
        operands.append(filled.expand(shape) if is_tensor else filled)
    x = _zeros(before, types[0], gradients[0]) if saved.x is None else saved.x
    at_end = gradients[0]
    parts = _parts(line, saved, x)
    if parts[-1].end < len(line.words):
        y = saved.resumed_behind if saved.resumed is None else saved.resumed
        at_end = IN_TORCH[line.words[-1].name].from_result(y, at_end)
    found: dict[int, Tensor] = {}  # 0: x's, i + 1: operand i's
    for part in reversed(parts):
        compose_with = functools.partial(compose, dropout_state=saved.dropout_state, first_row=first_row, dtype=dtype)
        at_end = _pull(line, part, compose_with, operands, at_end, gradients[1:], found)
    found[0] = at_end
    outputs = _native.gradients(line.text, types[0] % _native.BROADCAST, tuple(types[1:]), wanted)["outputs"]
    return tuple(_summed(found[o["input"]], o).to(OF_DTYPE[o["dtype"]]) for o in outputs)


def _summed(gradient: Tensor, output: dict) -> Tensor:
    """In the shape that the kernel gives it."""
    if output["column"] and output["has"] >= 0:
        gradient = gradient.sum_to_size(sizes_of_sum(gradient.shape, output["has"]))
    unit = output["unit"]
    return gradient if unit == 1 else sum_of_neighbours(gradient, gradient.shape[-1] // unit)


def refuse_twice(line) -> NoReturn:
    """For what `cannot_be_made_again`."""
    raise RuntimeError(
        f'onepass: the line "{line.text}" cannot be differentiated twice (create_graph=True) where its matrix needs no '
        "gradient, since what that is multiplied with is not saved then; Line.reference(...) can"
    )


def cannot_be_made_again(line, saved: Saved) -> bool:
    """Whether a product was saved, but not what it is made of."""
    if not line.reads_product or saved.product is None:
        return False
    for_weight = [o for o, is_only in zip(saved.operands, line.operands_for_weight) if is_only]
    return any(t is None for t in ([saved.x, *for_weight] if line.x_for_weight else for_weight))


def _shapes(line, gradients, saved) -> tuple[torch.Size, torch.Size]:
    """Of x, and of what a contraction gives."""
    shape = like_x(line.text, gradients, saved.x, saved.resumed, saved.resumed_behind).shape
    if line.weight is None:
        return shape, shape
    matrix = saved.operands[line.weight]
    return torch.Size((*shape[:-1], matrix.shape[-1])), torch.Size((*shape[:-1], matrix.shape[-2]))


def _zeros(shape, dtype: int, like: Tensor) -> Tensor:
    """For a mask: all is kept."""
    of = OF_DTYPE[dtype % _native.BROADCAST]
    return torch.full(shape, of == torch.bool, dtype=of, device=like.device)


def _parts(line, saved, x) -> list[_Part]:
    """Without the line's last word where its result was saved."""
    parts, begin, value = [], 0, x
    behind_keeps = [i + 1 for i, word in enumerate(line.words) if word.kind == "keep"]
    resumptions = [(line.resumes_from, saved.resumed), (line.resumes_behind, saved.resumed_behind)]
    for result, known in [] if line.values else resumptions:
        if known is None:
            continue
        if result == 0:
            return [*parts, _Part(begin, len(line.words) - 1, value)]
        end = behind_keeps[result - 1]
        parts.append(_Part(begin, end, value))
        begin, value = end, known
    return [*parts, _Part(begin, len(line.words), value)]


def _pull(line, part, compose_with, operands, at_end, of_kept, found) -> Tensor:
    """The gradient at a part's begin, from that at its end; those of its operands are put among the found ones."""
    earlier, words = line.words[: part.begin], line.words[part.begin : part.end]
    first, first_kept, dropouts = (
        sum(count(word) for word in earlier) for count in (_taken, _is_keep, lambda w: w.kind == "dropout")
    )
    ends_in_keep = 0 < part.end < len(line.words) and _is_keep(words[-1])  # whose dtype may not be x's
    kept_count = sum(map(_is_keep, words)) + max(sum("gives_number" in word.properties for word in words) - 1, 0)
    places = range(first, first + sum(map(_taken, words)))
    smooth = [i for i in places if operands[i].is_floating_point()]

    def run(value, *some):
        given = dict(zip(smooth, some))
        taken = [given.get(i, operands[i]) for i in places]
        result, *kept = compose_with(words, value, taken, dropouts=dropouts)
        return kept[-1] if ends_in_keep else result, *kept

    _, pull = torch.func.vjp(run, part.value, *[operands[i] for i in smooth])
    kept = of_kept[first_kept : first_kept + kept_count]
    at_begin, *others = pull((at_end, *kept))
    found.update((1 + i, gradient) for i, gradient in zip(smooth, others))
    return at_begin


def _taken(word) -> int:
    return 0 if word.operand == "none" else word.operands


def _is_keep(word) -> bool:
    return word.kind == "keep"
