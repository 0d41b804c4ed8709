"""What a call does, counted: operators that compute, bytes of the tensors they take and give, kernels on CUDA."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Operators", "kernels", "peak"]


class Operators(TorchDispatchMode):
    """Counts the operators below autograd that compute, and the bytes of the tensors that each takes and gives.

    A view computes nothing. A onepass operator is one, whatever it calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        taken, given = tensors((args, kwargs)), tensors(results)
        known = {t.untyped_storage().data_ptr() for t in taken}
        if function._schema.is_mutable or any(t.untyped_storage().data_ptr() not in known for t in given):
            self.count += 1
            self.bytes += sum(map(distinct_bytes, taken + given))
        return results


def tensors(tree: object) -> list[Tensor]:
    """Those that a nest of arguments or results has."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def distinct_bytes(tensor: Tensor) -> int:
    """A tensor's, without those that an expansion repeats."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride()) if stride)
    return math.prod(sizes) * tensor.element_size()


def kernels(call: Callable[[], object], device: torch.device) -> int:
    """How many kernels a call launches on a CUDA device; copies and fills by the driver are none."""
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize(device)
    on_device = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in on_device)


class Alive(TorchDispatchMode):
    """The most bytes of results that are alive at once, operators' own scratch memory left out."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        taken = {StorageWeakRef(t.untyped_storage()) for t in tensors((args, kwargs))}
        for storage in (t.untyped_storage() for t in tensors(results)):
            if StorageWeakRef(storage) not in taken:
                self.alive[StorageWeakRef(storage)] = storage.nbytes()
        self.alive = {reference: size for reference, size in self.alive.items() if not reference.expired()}
        self.most = max(self.most, sum(self.alive.values()))
        return results


def peak(call: Callable[[], object], device: torch.device) -> int:
    """The most bytes of a call beyond what there was: the allocator's on CUDA, of operators' results on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with Alive() as alive:
        call()
    return alive.most
