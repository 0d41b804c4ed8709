"""What one ATen operator moves: bytes that are read and written, and flops of its products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from onepass.pricing import formulas

__all__ = ["Kernel", "bytes_of", "kernel_of", "kernel_with", "tensors_in"]


class Kernel(NamedTuple):
    """An operator that moves data.

    Attributes:
        name: of ATen's operator, without a namespace.
        bytes: that it reads and writes.
        written: of these, the ones that it writes.
        flops: of its matrix products.
        elements: of its largest tensor.
        columns, dtype: of its first tensor's rows; of group_norm's a channel's numbers.
    """

    name: str
    bytes: int
    written: int
    flops: int
    elements: int
    columns: int
    dtype: torch.dtype


def kernel_of(operator, arguments: tuple, keywords: dict[str, Any], result: Any) -> Kernel | None:
    """The kernel that a call of an operator is; None where its results only view what it is given."""
    name = operator._overloadpacket.__name__
    if operator.namespace == "prim" or name in formulas.ALLOCATE or torch.Tag.inplace_view in operator.tags:
        return None
    read, written = _bytes_moved(operator, arguments, keywords, result)
    if not read + written:
        return None
    flops = formulas.flops_of(operator, arguments, keywords, result)
    return kernel_with(name, read, written, flops, tensors_in((arguments, keywords, result)))


def kernel_with(name: str, read: float, written: float, flops: float, tensors: Sequence[Tensor]) -> Kernel:
    """A kernel with these tensors."""
    first = next((t for t in tensors if t.dim()), tensors[0])
    own = 2 if "group_norm" in name else first.dim() - 1
    columns, elements = math.prod(first.shape[own:]) if first.dim() else 1, max(t.numel() for t in tensors)
    return Kernel(name, int(read + written), int(written), int(flops), elements, columns, first.dtype)


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def bytes_of(tensor: Tensor) -> int:
    """Of the memory that a tensor's elements lie in: those that are repeated count once."""
    if not tensor.numel():
        return 0
    elements = math.prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride != 0)
    return min(elements * tensor.itemsize, tensor.untyped_storage().nbytes())


def _bytes_moved(operator, arguments: tuple, keywords: dict[str, Any], result: Any) -> tuple[int, int]:
    """Read and written: each tensor once, however often an operator is given it."""
    name = operator._overloadpacket.__name__
    given = [
        (i, argument, tensors_in(arguments[i] if i < len(arguments) else keywords.get(argument.name)))
        for i, argument in enumerate(operator._schema.arguments)
    ]
    there = {_memory(t) for _, _, tensors in given for t in tensors}
    results = tensors_in(result)
    fresh = [t for t in results if _memory(t) not in there]
    others = [t for i, _, tensors in given if i for t in tensors]
    read: dict[tuple, int] = {}
    written = {_identity(t): bytes_of(t) for t in fresh}
    for i, argument, tensors in given:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for t in tensors:
            size = bytes_of(t)
            if writes and i == 0 and name in formulas.SCATTER:
                size = min(size, t.itemsize * max((other.numel() for other in others), default=0))
            if writes:
                written[_identity(t)] = size
            if not (argument.is_out or writes and name in formulas.OVERWRITE):
                read[_identity(t)] = min(size, _bytes_read(name, i, t, fresh, others))
    if results and not written:
        return 0, 0  # a view
    return sum(read.values()), sum(written.values())


def _bytes_read(name: str, index: int, t: Tensor, fresh: list[Tensor], others: list[Tensor]) -> float:
    """At most so many bytes of an argument are read."""
    if index in formulas.UNREAD.get(name, ()):
        return t.itemsize * t.shape[0] if name.endswith("_forward") and t.dim() else 0
    if formulas.SELECT.get(name) == index:
        return sum(map(bytes_of, fresh))
    if name.startswith("_embedding_bag") and index == 0 and not name.endswith("backward"):
        return t.itemsize * t.shape[-1] * others[0].numel()
    return math.inf


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _identity(tensor: Tensor) -> tuple:
    return _memory(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
