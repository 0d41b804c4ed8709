"""What a call of PyTorch's does on a device: the kernels that it becomes, forward and backward. The call is made with
tensors without data, so that whatever it is made of shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from onepass.pricing import formulas
from onepass.pricing.composites import stand_in
from onepass.pricing.kernels import Kernel, kernel_of, tensors_in

__all__ = ["Counts", "TensorLike", "count"]


@dataclass
class Counts:
    """The kernels of a call, forward and backward.

    Attributes:
        unknown: operators that may compute more than is counted: only their bytes are known.
    """

    forward: list[Kernel] = field(default_factory=list)
    backward: list[Kernel] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


class TensorLike(NamedTuple):
    """All of a tensor that a call's cost depends on; arguments that are one tensor have the same index."""

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def made(self) -> Tensor:
        """Within a mode of tensors without data. Never on a GPU: PyTorch's engine has no threads for one that is not
        here."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        return tensor.requires_grad_() if self.requires_grad else tensor


def count(call: Callable, arguments: Any, keywords: dict[str, Any], cast: torch.dtype | None, trains: bool) -> Counts:
    """The kernels of a call.

    Args:
        call: a function of torch or of Python.
        arguments, keywords: its arguments, `TensorLike` in the place of tensors.
        cast: the dtype in which autocast multiplies, if it is on.
        trains: whether backward is counted, too: what gives gradients to those tensors that require them.

    Raises:
        Exception: whatever the call raises for tensors without data.
    """
    try:
        return _count(call, arguments, keywords, cast, trains, writes=False)
    except RuntimeError as error:
        if "leaf Variable" not in str(error):
            raise
        return _count(call, arguments, keywords, cast, trains, writes=True)


def _count(call, arguments, keywords, cast: torch.dtype | None, trains: bool, writes: bool) -> Counts:
    """`writes`: the call overwrites what requires gradients, and so is no leaf."""
    leaves: dict[int, Tensor] = {}
    given: dict[int, Tensor] = {}

    def make(like: Any) -> Any:
        if isinstance(like, TensorLike) and like.index not in leaves:
            leaf = leaves[like.index] = like.made()
            given[like.index] = leaf.clone() if writes and leaf.requires_grad else leaf
        return given[like.index] if isinstance(like, TensorLike) else like

    counts = Counts()
    with _nothing_else_changes(), FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(trains):
        inputs, options = (
            tree_map(make, tree, is_leaf=lambda x: type(x) is TensorLike) for tree in (arguments, keywords)
        )
        counter = _Counter(counts)
        with torch.autocast("cpu", cast or torch.bfloat16, cast is not None, cache_enabled=False), counter:
            result = stand_in(call, counter.tell)(*inputs, **options)
        if trains:
            written = [t for index, t in given.items() if t is not leaves[index]]
            counter.into = counts.backward
            _run_backward(counter, [*tensors_in(result), *written], list(leaves.values()))
    return counts


@contextlib.contextmanager
def _nothing_else_changes() -> Iterator[None]:
    """The generator's state is left as it was, whatever is called."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        yield


def _run_backward(counter: _Counter, results: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    learned = [leaf for leaf in leaves if leaf.requires_grad]
    results = list({id(t): t for t in results if t.grad_fn is not None}.values())
    if learned and results:
        upstream = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in results]
        with counter:
            torch.autograd.grad(results, learned, upstream, allow_unused=True)


class _Counter(TorchDispatchMode):
    """Writes down all operators that move something."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts, self.into = counts, counts.forward

    def tell(self, kernel: Kernel) -> None:
        self.into.append(kernel)

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        keywords = keywords or {}
        written_out = _written_out(operator)
        if written_out is not None:
            with self:
                return written_out(*arguments, **keywords)
        result = operator(*arguments, **keywords)
        kernel = kernel_of(operator, arguments, keywords, result)
        if kernel is not None:
            self.tell(kernel)
            if formulas.is_unknown(operator):
                self.counts.unknown.append(f"{operator.namespace}::{kernel.name}")
        return result


def _written_out(operator) -> Callable | None:
    """What does the same by other operators, where nothing is known of this one."""
    if operator.namespace == "prim" or formulas.has_formula(operator):
        return None
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")
    return formulas.WRITTEN_OUT.get(operator._overloadpacket, operator.decompose if composite else None)
