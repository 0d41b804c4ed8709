"""What torch.distributed's parallelism needs of this package beside lines that take DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["SequenceParallel"]


class SequenceParallel(ParallelStyle):
    """`torch.distributed.tensor.parallel.SequenceParallel` for modules of several inputs or results, such as
    `onepass.nn.AddLayerNorm` and `onepass.nn.DropoutAdd`: parameters are replicated, all tensors sharded in one
    dimension.

    Args:
        sequence_dim: the dimension in which inputs are sharded; those that are no DTensors are taken for such parts.
        use_local_output: whether results are local tensors, else they are DTensors.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__()
        self.placements = [Shard(sequence_dim)]
        self.use_local_output = use_local_output

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        return distribute_module(module, device_mesh, None, self._sharded, self._given)

    def _sharded(self, module: torch.nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        def sharded(value: Any) -> Any:
            if isinstance(value, DTensor):
                return value.redistribute(placements=self.placements)
            if isinstance(value, torch.Tensor):
                return DTensor.from_local(value, mesh, self.placements, run_check=False)
            return value

        return tuple(sharded(value) for value in inputs)

    def _given(self, module: torch.nn.Module, results: Any, mesh: DeviceMesh) -> Any:
        if not self.use_local_output:
            return results
        if isinstance(results, tuple):
            return tuple(result.to_local() for result in results)
        return results.to_local()
