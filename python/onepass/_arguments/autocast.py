"""What autocast does to tensors: as torch's own functions would have them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

CAST = (torch.float32, torch.bfloat16, torch.float16)


def under_autocast(
    device_type: str, tensors: Sequence[Tensor | None], which: Collection[int] | None = None
) -> Sequence[Tensor | None]:
    """The same tensors; where autocast is enabled those of them (of these numbers, if given) that it casts in its
    dtype."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # which knows no such device
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        t.to(dtype) if (which is None or i in which) and t is not None and t.dtype in CAST else t
        for i, t in enumerate(tensors)
    )
