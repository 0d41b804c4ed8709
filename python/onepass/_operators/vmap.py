"""What torch.func.vmap makes of the operators: the batch joins the rows where they take it, else one call for each."""

from __future__ import annotations

import torch
from torch._functorch.vmap import _broadcast_to_and_flatten
from torch.utils._pytree import tree_flatten, tree_unflatten

from onepass import _native
from onepass._arguments.shapes import repetition, sizes_of_sum, sum_of_neighbours
from onepass._operators.composed import like_x
from onepass._operators.fake import gradients_of, library

# Tensors of a row for each of x's, by the names in the operators' schemas.
_ROWS = ("x", "gradients", "resumed", "product", "resumed_behind")
_OPERANDS_OF_ROWS = ("tensor", "target", "keys", "values")


def _register(name: str) -> None:
    op = getattr(torch.ops.onepass, name).default
    names = [argument.name for argument in op._schema.arguments]

    def rule(info, in_dims, *args):
        given, dims = dict(zip(names, args)), dict(zip(names, in_dims))
        if not name.startswith("group") and _may_join_rows(given, dims):
            return _together(op, info.batch_size, given, dims)
        return _one_by_one(op, info.batch_size, args, in_dims)

    torch.library.register_vmap(f"onepass::{name}", rule, lib=library)


def _operand_words(line: str) -> list[dict]:
    """Each operand's."""
    words = _native.describe(line)["words"]
    return [word for word in words if word["operand"] != "none" for _ in range(word["operands"])]


def _operand_kinds(line: str) -> list[str]:
    return [word["operand"] for word in _operand_words(line)]


def _may_join_rows(given, dims) -> bool:
    """Not where samples have their own matrices, or want gradients of them, or own columns beside a matrix; nor with
    dropout, whose mask depends on an element's place among all."""
    line = given["line"]
    kinds = _operand_kinds(line)
    own = ("column", *_OPERANDS_OF_ROWS) if _native.describe(line)["weight"] is None else _OPERANDS_OF_ROWS
    shared = [i for i, kind in enumerate(kinds) if kind not in own]
    wanted = given.get("wanted", 0)
    least = 1 if any("is_causal" in word["properties"] for word in _native.describe(line)["words"]) else 0
    return (
        given["dropout_state"] is None
        and all(dims["operands"][i] is None and not wanted >> (i + 1) & 1 for i in shared)
        and _rank(given, dims) > least
    )


def _rank(given, dims) -> int:
    """How many dimensions x has for one sample."""
    if "gradients" in given and not _native.describe(given["line"])["numbers"][0]:
        return given["gradients"][0].dim() - (dims["gradients"][0] is not None)
    like = next(name for name in ("x", "resumed", "resumed_behind") if given.get(name) is not None)
    return given[like].dim() - (dims[like] is not None)


def _together(op, size: int, given, dims):
    line, rank = given["line"], _rank(given, dims)
    kinds = _operand_kinds(line)

    def rows(t, dim):
        if t is None:
            return None
        return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)

    def operand(t, dim, kind):
        if kind not in ("tensor", "column"):
            return rows(t, dim) if kind in _OPERANDS_OF_ROWS else t
        if t is not None and t.dim() - (dim is not None) > rank:  # its first dimension is not the samples'
            raise RuntimeError(
                f"onepass: an operand must broadcast to x, which has {rank} dimensions, got {list(t.shape)}"
                + ("" if dim is None else f" with the samples in dimension {dim}")
            )
        if dim is None:
            return t
        t = t.movedim(dim, 0)
        if t.dim() == 1 and kind == "column":
            raise RuntimeError("onepass: a column must have at least one dimension, got none")
        return t.reshape(size, *[1] * (rank + 1 - t.dim()), *t.shape[1:])

    args = dict(given)
    for name in _ROWS:
        if name in args:
            t, dim = args[name], dims[name]
            args[name] = [rows(*both) for both in zip(t, dim)] if name == "gradients" else rows(t, dim)
    args["operands"] = [operand(*each) for each in zip(given["operands"], dims["operands"], kinds)]
    if given.get("statistics") is not None:  # [statistics, rows]
        args["statistics"] = rows(given["statistics"], dims["statistics"]).movedim(0, 1).flatten(1).contiguous()
    if "operand_types" in args:
        return _gradients_together(op, size, args, kinds)
    results = op(*args.values())
    out_dims = [0] * len(results)
    saves = given.get("save_statistics") or given.get("save") and _native.describe(line)["reads_statistics"]
    if saves:
        results[-1] = results[-1].unflatten(1, (size, -1))
        out_dims[-1] = 1
    return results, out_dims


def _gradients_together(op, size: int, args, kinds):
    """The samples' own gradients: sums over a sample's rows are not to be sums over all. What the operator is told for
    that may give them in another order, and add fewer columns up."""
    like = like_x(args["line"], args["gradients"], args["x"], args["resumed"], args.get("resumed_behind"))
    joined, types = like.shape, []
    units = [of // _native.UNIT for of in args["operand_types"]]
    words = _operand_words(args["line"])
    least = min((unit for unit, word in zip(units, words) if "by_channels" in word["properties"]), default=0)
    for kind, of in zip(kinds, args["operand_types"]):
        own, unit = None, min(of // _native.UNIT, least) * _native.UNIT
        of %= _native.UNIT  # noqa: PLW2901
        if kind == "column" and of < _native.BROADCAST:
            own = joined[-1:]
        elif of // _native.SUMMED % 2:
            own = sizes_of_sum(joined[1:], of // _native.HAS)
        if own is not None:
            of = of % _native.BROADCAST + repetition(_with_samples(size, own, len(joined)), joined)  # noqa: PLW2901
        types.append(of + unit)
    first = torch.empty(joined[1:], dtype=like.dtype, device="meta")
    of_sample = gradients_of(first, args["line"], args["operand_types"], args["wanted"])
    results = op(*(args | {"operand_types": types}).values())
    each, together = (
        _native.gradients(args["line"], _native.DTYPES[like.dtype], tuple(of), args["wanted"])
        for of in (args["operand_types"], types)
    )
    found = [results[together["inputs"][output["input"]]] for output in each["outputs"]]
    return [_of_samples(r, t, size, len(joined)) for r, t in zip(found, of_sample)], [0] * len(found)


def _of_samples(gradient: torch.Tensor, of_sample: torch.Tensor, size: int, dims: int) -> torch.Tensor:
    """A gradient of so many samples as one has it."""
    last = of_sample.shape[-1] if of_sample.dim() else 1
    if gradient.dim() and gradient.shape[-1] != last:
        gradient = sum_of_neighbours(gradient, last)
    gradient = gradient.sum_to_size(_with_samples(size, of_sample.shape, dims))
    return gradient.reshape(size, *of_sample.shape).to(of_sample.dtype)


def _with_samples(size: int, own, dims: int) -> tuple[int, ...]:
    """Of a shape for each of the samples, among tensors of so many dimensions."""
    return (size, *[1] * (dims - 1 - len(own)), *own)


def _one_by_one(op, size: int, args, in_dims):
    tensors, spec = tree_flatten(args)
    dims = _broadcast_to_and_flatten(in_dims, spec)
    each = [
        # Contiguous, as the kernels take their statistics to be.
        op(*tree_unflatten([t if d is None else t.select(d, i).contiguous() for t, d in zip(tensors, dims)], spec))
        for i in range(size)
    ]
    results = [torch.stack(some) for some in zip(*each)]
    return results, [0] * len(results)


for _kind in ("elementwise", "rowwise", "linear", "scores", "attention", "group"):
    for _direction in ("forward", "backward"):
        _register(f"{_kind}_{_direction}")
