"""What a node of a captured graph computes, whichever of PyTorch's spellings it has."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from onepass import reference
from onepass._arguments.shapes import is_sharded
from onepass.graph.effects import effects_of, memory_of

__all__ = [
    "MOVING",
    *("Operation", "allocates", "called", "is_contiguous", "is_tensor", "known", "leave_apart", "modes", "operation"),
    *("results_of", "same", "same_shape", "sizes", "uncast", "value_of"),
]


APART = "apart"  # in a node's meta
MOST_OVERWRITTEN = 8
"""Times in a row."""


class Operation(NamedTuple):
    """A function's name, and its arguments: nodes and constants. An activation has the name and the numbers of its
    word."""

    name: str
    arguments: tuple[Any, ...]


def value_of(node: Any) -> Any:
    """What the node gave when it was captured: a tensor without data, or what else it gives."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def called(node: fx.Node) -> Any:
    """The function, or the method's name; of what a graph is given None, whatever name that has."""
    return node.target if node.op in ("call_function", "call_method") else None


def results_of(node: fx.Node) -> list[Tensor]:
    """The tensors that a node gives."""
    return [leaf for leaf in tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]


def is_tensor(node: Any) -> bool:
    """Whether the node gives one, dense and strided. Within `torch.vmap` and its like there are none that have memory,
    and what a subclass of tensors makes of an operator is its own affair."""
    value = value_of(node)
    if not isinstance(value, FakeTensor) and not (isinstance(value, Tensor) and is_sharded(value)):
        return False
    return value.layout == torch.strided and not value.is_nested and not value.is_quantized


def same(size: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Whether two sizes are equal in all calls that the graph serves: of sizes that change from call to call it is not
    decided here, since what is decided is a guard, and another size captured anew."""
    if isinstance(size, int) and isinstance(other, int):
        return size == other
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes sympy, which takes a while

    return statically_known_true(size == other)


def same_shape(shape: Sequence[int | torch.SymInt], other: Sequence[int | torch.SymInt]) -> bool:
    """The same for all sizes of two shapes."""
    return len(shape) == len(other) and all(map(same, shape, other))


def is_contiguous(tensor: Tensor) -> bool:
    """Whether its strides are those of a new tensor; those of dimensions of one, too, which say whether PyTorch takes
    it for channels-last."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
        if not same(stride, expected):
            return False
        expected = expected * (1 if same(size, 0) else size)
    return True


def modes(graph: fx.Graph) -> list[tuple]:
    """What is set behind each node: whether gradients are recorded, and what was entered: autocasts, levels of vmap."""
    records, entered, found = torch.is_grad_enabled(), [], []
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == "_set_grad_enabled":
            records = node.args[0]
        elif name.startswith("_enter_") or name.endswith("_increment_nesting"):
            entered.append(node)
        elif name.startswith("_exit_") or name.endswith("_decrement_nesting"):
            del entered[-1:]  # none, of what was entered before the graph
        found.append((records, *entered))
    return found


def leave_apart(graph: fx.Graph) -> None:
    """Marks what stands where gradients are recorded otherwise than in the rest of the graph: no operation of ours."""
    for node, (records, *_) in zip(graph.nodes, modes(graph)):
        node.meta[APART] = records != torch.is_grad_enabled()


def sizes(tensor: Tensor) -> tuple[int, ...]:
    """A shape in numbers, those of the call that was captured."""
    return tuple(s if isinstance(s, int) else _of_capture(s) for s in tensor.shape)


def _of_capture(size: torch.SymInt) -> int:
    hint = size.node.hint if size.node.has_hint() else None
    return UNKNOWN_SIZE if hint is None else int(hint)


UNKNOWN_SIZE = 4096
"""Taken for a size that depends on a tensor's numbers, where something is to be predicted."""


def operation(node: Any) -> Operation | None:
    """The node's operation, if it is an activation or one of those below, with a floating-point tensor as its
    result."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return None
    names = () if node.meta.get(APART) else _names(node.target)
    if not names or not is_tensor(node) or not value_of(node).is_floating_point() or not _does_nothing_else(node):
        return None
    return next(filter(None, (_read(name, node) for name in names)), None)


def _read(name: str, node: fx.Node) -> Operation | None:
    """The node, if it is this operation."""
    try:
        arguments = _READERS[name](*node.args, **node.kwargs) if name in _READERS else _activation(name, node)
    except TypeError:  # a spelling of PyTorch's that the reader does not know
        return None
    if isinstance(arguments, fx.Node):
        return _simplest(node, arguments)
    return Operation(name, arguments) if type(arguments) is tuple else arguments


def _activation(name: str, node: fx.Node) -> tuple[Any, ...] | None:
    def read(input, *args, **kwargs):
        numbers = reference.IN_TORCH[name].numbers(*args, **kwargs)
        return None if numbers is None else (input, *numbers)

    return read(*node.args, **node.kwargs)


def _names(target: Any) -> tuple[str, ...]:
    """The operations that a call of this function may be."""
    name = OTHERS.get(target)
    return reference.words_called(target) if name is None else (name,)


def known() -> set[str]:
    """The names of all operations."""
    return {*_READERS, *reference.ACTIVATIONS}


def allocates(name: str) -> bool:
    """Whether the operation's result is new memory, whatever its arguments are, or what it is given overwritten."""
    return name in _ALLOCATES or name in reference.ACTIVATIONS


def uncast(node: fx.Node) -> fx.Node:
    """The tensor before it was made another floating-point type. Who calls this asks whether the types hold it."""
    while (op := operation(node)) is not None and op.name in ("cast", "same"):
        node = op.arguments[0]
    return node


def _simplest(node: fx.Node, argument: fx.Node) -> Operation | None:
    """Of what moves no number of a row: a cast, a view, or nothing at all."""
    source, result = value_of(argument), value_of(node)
    if not is_tensor(argument) or not source.is_floating_point() or source.device != result.device:
        return None
    if same_shape(source.shape, result.shape):
        return Operation("cast" if source.dtype != result.dtype else "same", (argument,))
    same_rows = source.dim() and result.dim() and same(source.shape[-1], result.shape[-1])
    return Operation("view", (argument,)) if same_rows and same(source.numel(), result.numel()) else None


def _does_nothing_else(node: fx.Node) -> bool:
    """Whether all that the node does is to give its result. It may write this into the tensor that it takes where
    nobody can see that: where this is new, and read here only."""
    effects = effects_of(node)
    if not effects.known or effects.changes_shape:
        return False
    if not effects.writes:
        return True
    first = node.args[0] if node.args else None
    if not is_tensor(first) or len(first.users) != 1 or value_of(first).dtype != value_of(node).dtype:
        return False
    return effects.writes <= memory_of(value_of(first)) and _is_new(first)


def _is_new(node: fx.Node) -> bool:
    """Whether the node's result is memory that nobody else has: made by an operation that allocates it, and overwritten
    by a few others since, each of which has had it alone."""
    for _ in range(MOST_OVERWRITTEN):
        called = node.op in ("call_function", "call_method")  # an input may have the name of a method
        names = _names(node.target) if called else ()
        if not names or not all(map(allocates, names)) or node.meta.get(APART):
            return False
        if not (writes := effects_of(node).writes):
            return effects_of(node).known
        first = node.args[0] if node.args else None
        if not is_tensor(first) or len(first.users) != 1 or not writes <= memory_of(value_of(first)):
            return False
        node = first
    return False


def _binary(input, other, *, alpha=1):
    return (input, other) if alpha == 1 else None


def _divide(input, other, *, rounding_mode=None):
    if rounding_mode is not None:
        return None
    if isinstance(other, (int, float)) and _is_normal(other, input) and _is_normal(1 / other, input):
        return Operation("mul", (input, 1 / other))
    return input, other


def _is_normal(number: float, of: Any) -> bool:
    """Whether the type in which a tensor's numbers are computed holds it to full precision."""
    range_of = torch.finfo(torch.float64 if value_of(of).dtype == torch.float64 else torch.float32)
    return range_of.tiny <= abs(number) <= range_of.max


def _row_mean(input, dim=None, keepdim=False, *, dtype=None):
    return (input,) if keepdim and _is_last(input, dim) else None


def _row_variance(input, dim=None, unbiased=None, keepdim=False, *, correction=None):
    biased = unbiased is False or correction == 0
    return (input,) if biased and keepdim and _is_last(input, dim) else None


def _softmax(input, dim=None, _stacklevel=3, dtype=None):
    return (input,) if _is_last(input, dim) else None


def _normalize(input, p=2.0, dim=1, eps=1e-12, out=None):
    return (input, float(eps)) if p == 2 and _is_last(input, dim) and isinstance(eps, (int, float)) else None


def _layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    return (input, weight, bias, eps) if len(normalized_shape) == 1 else None


def _rms_norm(input, normalized_shape, weight=None, eps=None):
    return (input, weight, eps) if len(normalized_shape) == 1 else None


def _group_norm(input, num_groups, weight=None, bias=None, eps=1e-5, cudnn_enabled=True):
    return (input, num_groups, weight, bias, eps)


def _dropout(input, p=0.5, training=True, inplace=False):
    return (input, float(p)) if training and p > 0 else input


def _linear(input, weight, bias=None):
    return (input, weight, bias)


def _addmm(input, mat1, mat2, *, beta=1, alpha=1):
    return (mat1, mat2, input) if beta == alpha == 1 else None


def _unary(input, inplace=False):
    return (input,)


def _moved(input, *sizes, **options):
    """Casts and views: what they do is read off their result."""
    return input


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    return (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _transposed(input, dim0, dim1):
    """Of the last two dimensions "swapped", of others "permuted"."""
    dims = value_of(input).dim()
    if dims < 2:
        return None
    order = list(range(dims))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return Operation("swapped", (input,)) if order[-1] == dims - 2 else _permuted(input, order)


def _permuted(input, *order, dims=()):
    """With the dimensions before the last in another order: rows stand elsewhere, and are what they were."""
    order = dims or (order[0] if len(order) == 1 and isinstance(order[0], (tuple, list)) else order)
    last = value_of(input).dim() - 1
    order = tuple(dim % (last + 1) for dim in order)
    return Operation("permuted", (input, order)) if order and order[-1] == last else None


def _with_dims_moved(input, source, destination):
    dims = value_of(input).dim()
    from_to = [[at] if isinstance(at, int) else at for at in (source, destination)]
    moves = sorted((to % dims, dim % dims) for dim, to in zip(*from_to)) if dims else []
    order = [dim for dim in range(dims) if all(dim != moved for _, moved in moves)]
    for to, dim in moves:
        order.insert(to, dim)
    return _permuted(input, order)


def _is_last(input: fx.Node, dim: Any) -> bool:
    if isinstance(dim, (tuple, list)):
        dim = dim[0] if len(dim) == 1 else None
    return dim is not None and dim in (-1, value_of(input).dim() - 1)


_nn = torch._C._nn
_TABLE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add": (_binary, (operator.add, torch.add, "add", operator.iadd, "add_")),
    "sub": (_binary, (operator.sub, torch.sub, "sub", operator.isub, "sub_")),
    "mul": (_binary, (operator.mul, torch.mul, "mul", operator.imul, "mul_")),
    "div": (_divide, (operator.truediv, torch.div, "div", operator.itruediv, "div_")),
    "rsqrt": (_unary, (torch.rsqrt, "rsqrt")),
    "erf": (_unary, (torch.erf, "erf")),
    "neg": (lambda input: Operation("mul", (input, -1.0)), (torch.neg, operator.neg, "neg")),
    **{
        name: (_unary, (getattr(torch, name), name))
        for name in ("expm1", "log1p", "sin", "cos", "sinh", "cosh", "atan")
    },
    "mean": (_row_mean, (torch.mean, "mean")),
    "var": (_row_variance, (torch.var, "var")),
    "layer_norm": (_layer_norm, (F.layer_norm, torch.layer_norm)),
    "rms_norm": (_rms_norm, (F.rms_norm, torch.rms_norm)),
    "group_norm": (_group_norm, (F.group_norm, torch.group_norm)),
    "softmax": (_softmax, (F.softmax, torch.softmax, "softmax")),
    "log_softmax": (_softmax, (F.log_softmax, torch.log_softmax, "log_softmax")),
    "l2_norm": (_normalize, (F.normalize,)),
    "dropout": (_dropout, (F.dropout, torch.dropout)),
    "linear": (_linear, (F.linear, _nn.linear)),
    "addmm": (_addmm, (torch.addmm,)),
    "matmul": (lambda input, other: (input, other), (torch.matmul, operator.matmul, "matmul", torch.bmm)),
    "attention": (_attention, (F.scaled_dot_product_attention, _nn.scaled_dot_product_attention)),
    "swapped": (
        _transposed,
        ("transpose", torch.transpose, "swapaxes", torch.swapaxes, "swapdims", torch.swapdims),
    ),
    "permuted": (_permuted, ("permute", torch.permute)),
    "dims_moved": (_with_dims_moved, ("movedim", torch.movedim, "moveaxis", torch.moveaxis)),
    "moved": (
        _moved,
        (
            *("to", "type", "type_as", "float", "double", "half", "bfloat16", "view", "reshape", "contiguous"),
            *(torch.reshape, "flatten", torch.flatten, "unsqueeze", "squeeze"),
        ),
    ),
}
_READERS = {name: reader for name, (reader, _) in _TABLE.items()}
OTHERS = {target: name for name, (_, targets) in _TABLE.items() for target in targets}

MOVING = ("same", "view", "permuted", "swapped")
"""Of these the numbers are what they were, elsewhere or not."""
_ALLOCATES = frozenset(_TABLE) - {"swapped", "permuted", "dims_moved", "moved", "dropout"}
