"""What a captured graph's nodes cost as PyTorch runs them, and what a line costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from onepass import _native
from onepass.graph.operations import is_tensor, operation, sizes, value_of
from onepass.line import Line
from onepass.pricing.counting import Counts
from onepass.pricing.kernels import Kernel
from onepass.pricing.nodes import counts_of
from onepass.pricing.profile import FEATURES, Profile
from onepass.reference import ACTIVATIONS
from onepass.word import about

__all__ = ["Price", "features_of", "of_counts", "of_node", "of_words", "size_of"]

BACKWARD: dict[str, tuple[int, int]] = {
    "add": (0, 0),
    **dict.fromkeys(("rsqrt", "erf", "softmax", "log_softmax", "dropout"), (2, 1)),
    **dict.fromkeys(("expm1", "log1p", "sin", "cos", "sinh", "cosh", "atan"), (2, 1)),
    **dict.fromkeys(("layer_norm", "rms_norm"), (2, 1)),
    **dict.fromkeys(("cast", "mean", "var", "sub"), (1, 1)),
    **dict.fromkeys(("mul", "div"), (1, 1)),
}
"""How many tensors of its input's size the backward of an operator reads and writes that has a rate by its name. A
product of two tensors has (3, 2), an activation that is one kernel (2, 1). All other operators are counted by calling
them."""
OF_ACTIVATION = (2, 1)
RATES = {"mul": "add", "sub": "add", "div": "add", "cast": "add", "erf": "gelu", "log_softmax": "softmax"}
DEAR = 12
"""Operations a number: an activation of more whose rate is not measured has gelu's."""


@dataclass(frozen=True)
class Price:
    """Bytes, floating-point operations, kernels and seconds on a device.

    Attributes:
        computing: of the seconds, those that the arithmetic of matrix products takes at least.
    """

    bytes: float = 0
    flops: float = 0
    kernels: int = 0
    seconds: float = 0
    host_seconds: float = 0
    computing: float = 0

    def __add__(self, other: Price) -> Price:
        return Price(
            self.bytes + other.bytes,
            self.flops + other.flops,
            self.kernels + other.kernels,
            self.seconds + other.seconds,
            self.host_seconds + other.host_seconds,
            self.computing + other.computing,
        )

    def __mul__(self, times: int) -> Price:
        return Price(*(amount * times for amount in vars(self).values()))

    @property
    def time(self) -> float:
        """Seconds until it is done: the host or the device is behind."""
        return max(self.seconds, self.host_seconds)


def of_node(node: fx.Node, profile: Profile, backward: bool = False) -> Price:
    """A node as PyTorch runs it; nothing for one that only says how a tensor is looked at.

    Element-wise operators and norms have the rates that a profile has by their names, with the tensors that they move;
    all else is made of what is counted when it is called.
    """
    op = operation(node)
    if op is None or not _has_rate(op.name, node):
        return of_counts(counts_of(node, backward), profile, backward)
    result = value_of(node)
    if backward and not result.requires_grad:
        return Price()
    inputs = [value_of(a) for a in op.arguments if is_tensor(a)]
    if node.meta.get("onepass_bias"):  # part of the product before it; its gradient is a sum over rows
        if backward:
            return _moved(size_of(result), _count(result), profile, "sum", result, False)
        return Price(size_of(inputs[1]), seconds=size_of(inputs[1]) / profile.bandwidth)
    name = _rated_as(op.name, profile)
    if not backward:
        bytes = sum(map(size_of, inputs)) + size_of(result)
        bytes += _count(result) if op.name == "dropout" else 0  # its mask
        return _moved(bytes, 4 * _count(result), profile, name, result, False)
    bytes = _moved_backward(op.name, inputs, result)
    return _moved(bytes, 8 * _count(result), profile, name, result, True) if bytes else Price()


def _has_rate(name: str, node: fx.Node) -> bool:
    """Whether the operation is one kernel, whose time follows from what it moves."""
    return name in BACKWARD or name in ACTIVATIONS and len(counts_of(node, training=False).forward) == 1


def _rated_as(name: str, profile: Profile) -> str:
    """The operator whose rate it has."""
    dear = name in ACTIVATIONS and name not in profile.operators and about(name).flops[0] > DEAR
    return "gelu" if dear else RATES.get(name, name)


def _moved_backward(name: str, inputs: Sequence[Tensor], result: Tensor) -> float:
    """What an element-wise operator's backward moves for those of its inputs that have gradients."""
    reads, writes = BACKWARD.get(name, OF_ACTIVATION)
    learns = [tensor.requires_grad for tensor in inputs]
    if name in ("mul", "div") and len(inputs) == 2:
        reads, writes = 1 + sum(learns), sum(learns)
    elif name == "add" or name == "sub" and learns[1:] != [True]:
        reads = writes = 0
    elif name != "sub":
        writes -= not learns[0]
    smaller = [tensor for tensor in inputs if tensor.requires_grad and 0 < _count(tensor) < _count(result)]
    bytes = max(map(size_of, inputs), default=0) * (reads + writes)
    return bytes + len(smaller) * size_of(result) * (name in ("add", "mul"))


def _moved(bytes: float, flops: float, profile: Profile, name: str, like: Tensor, backward: bool) -> Price:
    rate = profile.rate("operators", name, sizes(like)[-1] if like.dim() else 1, like.itemsize, backward)
    return Price(bytes, flops, 1, profile.moving(bytes, rate), profile.call)


def of_counts(counts: Counts, profile: Profile, backward: bool = False) -> Price:
    """What was counted, one direction of it: kernels one after the other."""
    return sum((_of_kernel(kernel, profile) for kernel in (counts.backward if backward else counts.forward)), Price())


def _of_kernel(kernel: Kernel, profile: Profile) -> Price:
    name, backward, _ = kernel.name.removeprefix("native_").strip("_").partition("_backward")
    if not kernel.flops:
        rate = profile.rate("operators", name, kernel.columns, kernel.dtype.itemsize, bool(backward))
        return Price(kernel.bytes, kernel.elements, 1, profile.moving(kernel.bytes, rate), profile.call)
    computing = kernel.flops / profile.product_rate(kernel.dtype, "convolution" in name)
    seconds = profile.fixed + max(computing, kernel.bytes / profile.bandwidth)
    if name == "addmm" and profile.name == "cpu":  # the bias is written where the product is added
        seconds += 2 * kernel.written / profile.bandwidth
    return Price(kernel.bytes, kernel.flops, 1, seconds, profile.call, computing)


def of_words(
    line: Line,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    profile: Profile,
    operands: Sequence[Tensor] | None = None,
    goes_on: bool = False,
    learns: Sequence[bool] | None = None,
) -> tuple[Price, Price]:
    """A line without a contraction on rows of this shape, forward and backward. Operands may be smaller than x, or have
    another dtype; they are x's equals if None. A line that goes on where a product ends, while its x is in a core's
    cache, writes its result in the product's place, and is no kernel of its own. `learns` says of x and the operands
    which have gradients; all that can if None."""
    cost = line.cost(shape, dtype)
    less = [0, 0]
    if operands is not None:
        less = _smaller(line, shape, dtype, operands)
        learns = learns or [True, *(operand.is_floating_point() for operand in operands)]
        less[1] += _not_learned(line, shape, dtype, learns)
    features = features_of(line)
    prices = []
    for side, is_backward in ((cost.forward, False), (cost.backward, True)):
        bytes = side.bytes - less[is_backward]
        rate = profile.line_rate(features, shape[-1], dtype.itemsize, is_backward)
        kernels = 1 + (is_backward and "column" in features)
        seconds = profile.start(features, math.prod(shape), dtype.itemsize, is_backward)
        seconds += bytes / (profile.bandwidth * rate)
        prices.append(Price(bytes, side.flops, kernels, seconds, profile.call_of_line))
    if goes_on:
        bytes, rate = prices[0].bytes, profile.line_rate(features, shape[-1], dtype.itemsize)
        moved = 2 * math.prod(shape) * dtype.itemsize
        seconds = max(bytes / rate - moved, 0.0) / profile.bandwidth
        prices[0] = Price(bytes - moved, cost.forward.flops, 0, seconds)
    return prices[0], prices[1]


def _smaller(line: Line, shape: tuple[int, ...], dtype: torch.dtype, operands: Sequence[Tensor]) -> list[int]:
    """Bytes that tensor operands have less than x, as often as each direction reads them."""
    less = [0, 0]
    for index in line.tensor_operands:
        whole = math.prod(shape) * dtype.itemsize
        less[0] += whole - size_of(operands[index])
        less[1] += (whole - size_of(operands[index])) * line.reads_operands[index]
    return less


def _not_learned(line: Line, shape: tuple[int, ...], dtype: torch.dtype, learns: Sequence[bool]) -> int:
    """Bytes of gradients that backward need not write."""
    types = (_native.DTYPES[dtype],) * (len(learns) - 1)

    def written(wanted: int) -> int:
        outputs = _native.gradients(line.text, _native.DTYPES[dtype], types, wanted)["outputs"]
        return sum((shape[-1] if output["column"] else math.prod(shape)) * dtype.itemsize for output in outputs)

    return written((1 << len(learns)) - 1) - written(sum(1 << i for i, learned in enumerate(learns) if learned))


def features_of(line: Line) -> tuple[str, ...]:
    """Of `FEATURES`, those that the line has."""
    properties = {property for word in line.words for property in word.properties}
    resumes = {"backward_from_result" in word.properties for word in line.words if word.kind == "row"}
    has = {
        "softmax": True in resumes,  # which log_softmax costs, too
        "norm": False in resumes,
        "dropout": any(word.kind == "dropout" for word in line.words),
        "column": any(word.operand == "column" for word in line.words),
        "activation": any(word.kind in ("activation", "gate") for word in line.words),
        "mean": "centres" in properties,
    }
    return tuple(feature for feature in FEATURES if has[feature])


def _count(tensor: Tensor) -> int:
    return math.prod(sizes(tensor))


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements in memory: those that are repeated count once."""
    places = zip(sizes(tensor), tensor.stride())
    repeated = math.prod(size for size, stride in places if isinstance(stride, int) and stride == 0 and size > 1)
    return _count(tensor) // repeated * tensor.itemsize
