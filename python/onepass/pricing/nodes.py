"""What a node of a captured graph does on a device, whatever it calls: the call is made again with tensors without
data, of the sizes and dtypes that the graph's have."""

from __future__ import annotations

import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_map

from onepass.graph.effects import effects_of, unwrapped
from onepass.graph.operations import results_of, value_of
from onepass.pricing import formulas
from onepass.pricing.counting import Counts, TensorLike, count
from onepass.pricing.kernels import Kernel

__all__ = ["bytes_in", "counts_of", "given_to", "gives_memory", "trains"]


def given_to(node: fx.Node) -> list[Tensor]:
    """The tensors that a node is given."""
    return [tensor for taken in node.all_input_nodes for tensor in results_of(taken)]


def gives_memory(node: fx.Node) -> bool:
    """Whether a node gives a tensor that is neither one that it was given, such as dropout that is off, nor a view."""
    there = {memory for tensor in given_to(node) for memory in _memory(tensor)}
    made = [tensor for tensor in results_of(node) if not _memory(tensor) <= there]
    return len(made) > bool(effects_of(node).gives)


def trains(node: fx.Node) -> bool:
    """Whether backward passes through a node: what it gives, or overwrites, has gradients."""
    changed = results_of(node) if value_of(node) is not None else given_to(node)[:1]
    return any(tensor.requires_grad for tensor in changed)


def counts_of(node: fx.Node, training: bool) -> Counts:
    """The kernels of a node, and those of its backward where it has one. What cannot be called without data moves what
    it is given and what it gives, and is called unknown."""
    if node.op not in ("call_function", "call_method", "call_module") or not _acts_on_tensors(node):
        return Counts()
    tensors = given_to(node) + results_of(node)
    only_wraps = getattr(node.target, "__module__", None) in ("torch._functorch.predispatch", "torch._C._functorch")
    devices = {tensor.device for tensor in tensors if tensor.dim()}  # numbers may be on the host
    if only_wraps or node.op == "call_module" or not all(map(_is_plain, tensors)) or len(devices) > 1:
        return _by_bytes(node, training)
    counts = _called(node, training)
    if not counts.forward and gives_memory(node) and _name(node) not in formulas.ALLOCATE:
        return _by_bytes(node, training)
    repeats = max((_elements(unwrapped(t)) // max(_elements(t), 1) for t in tensors), default=1)
    return counts if repeats == 1 else _repeated(counts, repeats, bytes_in(tensors))


def _called(node: fx.Node, training: bool) -> Counts:
    device = (results_of(node) + given_to(node))[0].device.type
    call, (arguments, keywords) = _call(node)
    cast, backward = _cast(node, device), training and trains(node)
    leaves, tree = tree_flatten((arguments, keywords), is_leaf=_is_like)
    key = (call, tree, tuple(map(_told, leaves)), cast, backward)
    if key in _known:
        _known.move_to_end(key)
        return _known[key]
    try:
        counts = count(call, arguments, keywords, cast, backward)
    except Exception:  # noqa: BLE001 - a function may ask for anything that a tensor without data has not
        counts = _by_bytes(node, training)
    _known[key] = counts
    if len(_known) > MOST:
        _known.popitem(last=False)
    return counts


def _repeated(counts: Counts, times: int, most: int) -> Counts:
    """By vmap, for each element of a batch; one kernel moves no more than there is."""

    def of(kernels: list[Kernel]) -> list[Kernel]:
        limit = most if len(kernels) == 1 else math.inf
        return [
            k._replace(bytes=min(k.bytes * times, limit), flops=k.flops * times, elements=k.elements * times)
            for k in kernels
        ]

    return Counts(of(counts.forward), of(counts.backward), counts.unknown)


MOST = 4096
_known: OrderedDict[tuple, Counts] = OrderedDict()
"""Layers of a model that are alike cost the same."""


def _acts_on_tensors(node: fx.Node) -> bool:
    """Not what only picks from a tuple or changes a mode."""
    if node.target is operator.getitem and not isinstance(value_of(node.args[0]), Tensor):
        return False
    return bool(results_of(node) or given_to(node)) and _name(node) != "set_rng_state"


def _by_bytes(node: fx.Node, training: bool) -> Counts:
    """All tensors once, forward; those that have gradients, and these, backward."""
    name = _name(node)
    given, results = given_to(node), results_of(node)
    if results and not gives_memory(node):
        return Counts()
    counts = Counts(unknown=[name])
    read, written = bytes_in(given), bytes_in(results)
    if read + written:
        elements, dtype = max(map(_elements, given + results)), (given + results)[0].dtype
        counts.forward.append(Kernel(name, read + written, written, 0, elements, 1, dtype))
        gradients = bytes_in(tensor for tensor in given if tensor.requires_grad)
        if training and trains(node) and gradients:
            counts.backward.append(Kernel(name, read + written + gradients, gradients, 0, elements, 1, dtype))
    return counts


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def bytes_in(tensors: Iterable[Tensor]) -> int:
    """Of all of these, of each once."""
    return sum(map(_size, {id(tensor): tensor for tensor in tensors}.values()))


def _elements(tensor: Tensor) -> int:
    return math.prod(map(_number, tensor.shape))


def _memory(tensor: Tensor) -> frozenset:
    """Of storages: several where a subclass has several tensors; none where it has no strides."""
    tensor = unwrapped(tensor)
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return frozenset().union(*(_memory(part) for part in parts if isinstance(part, Tensor)))
    return frozenset({tensor.untyped_storage()._cdata} if tensor.layout is torch.strided else {id(tensor)})


def _size(tensor: Tensor) -> int:
    """Of a tensor's elements in memory; of all that a transform has wrapped, or a subclass holds."""
    tensor = unwrapped(tensor)
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return sum(_size(part) for part in parts if isinstance(part, Tensor))
    return _elements(tensor) * tensor.itemsize


def _is_plain(tensor: Tensor) -> bool:
    """Whether shape and strides say all of its memory."""
    tensor = unwrapped(tensor)
    return not is_traceable_wrapper_subclass(tensor) and tensor.layout is torch.strided and not tensor.is_quantized


def _number(size: Any) -> Any:
    """Of the call that was captured; nobody knows how long what depends on data is: 1."""
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return 1 if hint is None else hint


def _call(node: fx.Node) -> tuple[Callable, tuple[tuple, dict]]:
    """The function, and its arguments with `TensorLike` in the place of tensors."""
    indices: dict[int, int] = {}

    def like(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return _number(value)
        index = indices.setdefault(id(value), len(indices))
        stride = tuple(map(_number, value.stride()))
        return TensorLike(index, tuple(map(_number, value.shape)), stride, value.dtype, value.requires_grad)

    arguments = fx.node.map_arg((node.args, node.kwargs), lambda taken: tree_map(like, value_of(taken)))
    arguments = tree_map(_on_the_host, arguments, is_leaf=_is_like)
    return getattr(Tensor, node.target) if node.op == "call_method" else node.target, arguments


def _is_like(value: Any) -> bool:
    return type(value) is TensorLike


def _on_the_host(value: Any) -> Any:
    """Devices in arguments: of tensors without data there is one."""
    named = isinstance(value, str) and value.partition(":")[0] in ("cuda", "meta", "xpu", "mps")
    return torch.device("cpu") if named or isinstance(value, torch.device) else value


def _told(leaf: Any) -> Any:
    return leaf if callable(leaf) else (type(leaf), repr(leaf))


def _cast(node: fx.Node, device: str) -> torch.dtype | None:
    """The dtype in which autocast multiplies where the node stands: that of the innermost one that the graph has
    entered, else that which the graph is captured in."""
    enabled = torch.is_autocast_enabled(device) if device != "meta" else False
    dtype = torch.get_autocast_dtype(device) if enabled else None
    for entered in node.graph.find_nodes(op="call_function", target=torch.amp.autocast_mode._enter_autocast):
        kind, cast, enables, *_ = entered.args
        left = [user for user in entered.users if user.target is torch.amp.autocast_mode._exit_autocast]
        if kind == device and entered < node and not any(user < node for user in left):
            dtype = (cast or torch.get_autocast_dtype(device)) if enables else None
    return dtype
