"""What tensors are, and whether those of a normalisation agree with its normalized_shape, in PyTorch's words where they
do not."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from onepass import _native


def normalized_shape_of(
    function: str, x: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> tuple[int, ...]:
    """normalized_shape as a tuple, once x, weight and bias are known to agree with it."""
    shape = (normalized_shape,) if isinstance(normalized_shape, numbers.Integral) else tuple(normalized_shape)
    try:
        if (
            x.shape[-len(shape) :] == shape
            and (weight is None or weight.shape == shape)
            and (bias is None or bias.shape == shape)
            and shape
        ):
            return shape
    except (AttributeError, RuntimeError):  # nested tensors have no shape
        pass
    raise_normalized_shape(function, x, shape, weight, bias)


def raise_normalized_shape(
    function: str, x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None
) -> NoReturn:
    check_tensor(function, "x", x)
    check_dense(function, "x", x)
    if not shape:
        raise RuntimeError(
            f"{function}(): expected normalized_shape to be at least 1-dimensional, but got normalized_shape=[]"
        )
    if x.shape[-len(shape) :] != shape:
        raise RuntimeError(
            f"{function}(): given normalized_shape={list(shape)}, expected x with shape "
            f"[*, {', '.join(map(str, shape))}], but got x of size {list(x.shape)}"
        )
    for name, column in (("weight", weight), ("bias", bias)):
        if column is not None:
            check_tensor(function, name, column)
            check_dense(function, name, column)
            if column.shape != shape:
                raise RuntimeError(
                    f"{function}(): expected {name} to be of same shape as normalized_shape={list(shape)}, "
                    f"but got {name} of shape {list(column.shape)}"
                )
    raise AssertionError("unreachable")


def check_groups(function: str, x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None) -> None:
    """Raises what `torch.nn.functional.group_norm` does, and no less clearly."""
    for name, value in (("x", x), ("weight", weight), ("bias", bias)):
        if value is not None or name == "x":
            check_tensor(function, name, value)
            check_dense(function, name, value)
    if x.dim() < 2:
        raise RuntimeError(f"{function}(): expected at least 2 dimensions for x, got x of shape {list(x.shape)}")
    if isinstance(num_groups, bool) or not isinstance(num_groups, (numbers.Integral, torch.SymInt)):
        raise TypeError(f"{function}(): argument 'num_groups' must be int, not {type(num_groups).__name__}")
    if num_groups <= 0:
        raise RuntimeError(f"{function}(): expected num_groups to be greater than 0, got {num_groups}")
    channels = x.shape[1]
    if channels % num_groups:
        raise RuntimeError(
            f"{function}(): expected the number of channels to be divisible by num_groups, "
            f"got x of shape {list(x.shape)} and num_groups={num_groups}"
        )
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.shape != (channels,):
            raise RuntimeError(
                f"{function}(): expected {name} to have a number for each of the {channels} channels of x, "
                f"got {name} of shape {list(value.shape)}"
            )
    if 0 in x.shape[2:]:
        raise RuntimeError(
            f"{function}(): expected the dimensions behind the channels to be greater than 0, "
            f"got x of shape {list(x.shape)}"
        )
    rows = x.shape[0] * channels // num_groups
    if rows * math.prod(x.shape[2:]) == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {[rows, num_groups, *x.shape[2:]]}"
        )


def check_tensor(function: str, argument: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{function}(): argument '{argument}' must be Tensor, not {type(value).__name__}")


def check_dense(function: str, argument: str, value: Tensor) -> None:
    """Raises NotImplementedError, as PyTorch's operators do, for tensors that are not one block of numbers."""
    kind = "nested" if value.is_nested else "quantized" if value.is_quantized else str(value.layout)
    if kind != "torch.strided":
        kind = kind if value.is_nested or value.is_quantized else f"layout {kind}"
        raise NotImplementedError(f"{function}(): {argument} must be a dense tensor (torch.strided), got {kind}")


_MOST_DIMS = 48


def repetition(own: Sequence[int], x: Sequence[int]) -> int:
    """What the shape of an operand that broadcasts to x's adds to its dtype: as in src/line/signature.h."""
    dims, missing = len(x), len(x) - len(own)
    has = turns = 0
    whole = True
    for d in range(dims - 1):
        if x[d] == 1:
            continue
        if d >= missing and own[d - missing] != 1:  # a branch, so that a traced size becomes a guard
            turns += turns % 2
            has |= 1 << dims - 2 - d
        else:
            turns += 1 - turns % 2
            whole = False
    if whole or turns > 3 or dims > _MOST_DIMS:
        return _native.BROADCAST
    return _native.BROADCAST + _native.SUMMED + _native.HAS * has


def unit_type(columns: int | torch.SymInt) -> int:
    """What channels of so many columns add to an operand's type, as in src/line/signature.h. A traced size becomes a
    guard: whether it is a multiple, and no more."""
    return next((_native.UNIT * log for log in (8, 7, 6, 5) if columns > 0 and columns % (1 << log) == 0), 0)


def sizes_of_sum(shape: Sequence[int], has: int) -> tuple[int, ...]:
    """Of the gradient of an operand that has these of x's leading dimensions."""
    last = len(shape) - 2
    return (*(size if has >> last - d & 1 else 1 for d, size in enumerate(shape[:-1])), shape[-1])


def sum_of_neighbours(columns: Tensor, count: int) -> Tensor:
    """Of the last dimension so many sums, each of as many neighbours."""
    return columns.unflatten(-1, (count, columns.shape[-1] // count)).sum(-1)


def sum_of_channels(columns: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Of a gradient of columns that of an operand of channels, of this shape and dtype."""
    return sum_of_neighbours(columns, shape[-1]).sum_to_size(shape).to(dtype)


def given(*tensors: Tensor | None) -> list[Tensor]:
    """Those that are not None."""
    return [tensor for tensor in tensors if tensor is not None]


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, asked without importing torch.distributed.tensor."""
    return hasattr(tensor, "device_mesh")
