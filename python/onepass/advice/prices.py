"""What a captured graph's nodes cost as PyTorch runs them, and what a line costs in their place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from onepass.advice.profile import FEATURES, Profile
from onepass.line import Line, _parse
from onepass.rewrite.chains import Chain
from onepass.rewrite.operations import is_tensor, operation, sizes, value_of
from onepass.rewrite.steps import CONTRACTIONS, kind

__all__ = ["Price", "features_of", "has_own_product", "joined_gradients", "of_chain", "of_line", "of_node", "of_words"]

BACKWARD: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("same", "view", "swapped", "add"), (0, 0)),
    **dict.fromkeys(("pow", "square", "sqrt", "rsqrt", "erf", "relu", "tanh", "sigmoid", "silu", "mish"), (2, 1)),
    **dict.fromkeys(("hardswish", "softplus", "gelu", "elu", "leaky_relu", "softmax", "dropout"), (2, 1)),
    **dict.fromkeys(("layer_norm", "rms_norm"), (2, 1)),
    **dict.fromkeys(("cast", "mean", "var", "sub"), (1, 1)),
    **dict.fromkeys(("mul", "div"), (1, 1)),
}
"""How many tensors of its input's size an operator's backward reads and writes. A product of two tensors has (3, 2)."""
RATES = {"mul": "add", "sub": "add", "div": "add", "cast": "add", "mish": "gelu", "softplus": "gelu", "erf": "gelu"}


@dataclass(frozen=True)
class Price:
    """Bytes, floating-point operations, kernels and seconds on a device."""

    bytes: float = 0
    flops: float = 0
    kernels: int = 0
    seconds: float = 0
    host_seconds: float = 0

    def __add__(self, other: Price) -> Price:
        return Price(
            self.bytes + other.bytes,
            self.flops + other.flops,
            self.kernels + other.kernels,
            self.seconds + other.seconds,
            self.host_seconds + other.host_seconds,
        )

    @property
    def time(self) -> float:
        """Seconds until it is done: the host or the device is behind."""
        return max(self.seconds, self.host_seconds)


def of_node(node: fx.Node, profile: Profile, backward: bool = False) -> Price:
    """A node that PyTorch runs as one kernel; nothing for one that only says how a tensor is looked at."""
    op = operation(node)
    if op is None:
        return _of_unknown(node, profile) if not backward else Price()
    if op.name in ("linear", "addmm", "matmul", "attention"):
        return _of_product(node, op.name, op.arguments, profile, backward)
    if op.name in ("same", "view", "swapped"):
        return Price()
    inputs = [value_of(a) for a in op.arguments if is_tensor(a)]
    result = value_of(node)
    if node.meta.get("onepass_bias"):  # part of the product before it; its gradient is a sum over rows
        return _moved(_size(result), _count(result), profile, "sum", result, False) if backward else Price()
    name = RATES.get(op.name, op.name)
    if not backward:
        bytes = sum(map(_size, inputs)) + _size(result)
        bytes += _count(result) if op.name == "dropout" else 0  # its mask
        return _moved(bytes, 4 * _count(result), profile, name, result, False)
    reads, writes = (3, 2) if op.name in ("mul", "div") and len(inputs) == 2 else BACKWARD.get(op.name, (2, 1))
    column_sum = sum(_size(result) for tensor in inputs if 0 < _count(tensor) < _count(result))
    bytes = max(map(_size, inputs), default=0) * (reads + writes)
    bytes += column_sum if op.name in ("add", "mul") else 0
    return _moved(bytes, 8 * _count(result), profile, name, result, True) if bytes else Price()


def _moved(bytes: float, flops: float, profile: Profile, name: str, like: Tensor, backward: bool) -> Price:
    rate = profile.rate("operators", name, sizes(like)[-1] if like.dim() else 1, like.itemsize, backward)
    return Price(bytes, flops, 1, profile.moving(bytes, rate), profile.call)


def _of_product(node: fx.Node, name: str, arguments, profile: Profile, backward: bool, own: bool = False) -> Price:
    result = value_of(node)
    tensors = [value_of(a) for a in arguments if is_tensor(a)]
    if name == "attention":
        query, key, value = map(sizes, tensors[:3])
        flops = 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
        flops = flops // 2 if arguments[5] else flops
    else:
        flops = 2 * _count(result) * sizes(tensors[0])[-1]
    bytes = sum(map(_size, tensors)) + _size(result)
    times = 2 if backward else 1
    if own:
        seconds = profile.multiplying_itself(flops, _size(tensors[1]), result.dtype)
    else:
        seconds = times * profile.multiplying(flops, bytes, result.dtype)
        if name in ("linear", "addmm") and len(tensors) > 2 and profile.name == "cpu" and not backward:
            seconds += 2 * _size(result) / profile.bandwidth  # the bias is written where the product is added
    return Price(times * bytes, times * flops, times, seconds, times * profile.call)


def _of_unknown(node: fx.Node, profile: Profile) -> Price:
    """What is not known by name moves its inputs and its result once, unless the result is a view."""
    result = value_of(node)
    if node.op not in ("call_function", "call_method") or not isinstance(result, Tensor):
        return Price()
    inputs = [value_of(n) for n in node.all_input_nodes if is_tensor(n)]
    if any(torch._C._is_alias_of(result, tensor) for tensor in inputs):
        return Price()
    bytes = sum(min(_size(t), 4 * _size(result)) for t in inputs) + _size(result)
    return Price(bytes, _count(result), 1, profile.moving(bytes), profile.call)


def of_chain(chain: Chain, profile: Profile, training: bool) -> tuple[Price, Price]:
    """The nodes that a line stands for as they are, forward and backward."""
    forward = sum((of_node(node, profile) for node in chain.nodes), Price())
    if not training:
        return forward, Price()
    backward = sum((of_node(node, profile, backward=True) for node in chain.nodes), Price())
    return forward, backward + joined_gradients(chain, profile)


def joined_gradients(chain: Chain, profile: Profile) -> Price:
    """Where a tensor is used twice, its gradients are added: two read, one written."""
    price = Price()
    for node in {*chain.nodes, chain.x}:
        uses = sum(user in chain.nodes for user in node.users)
        uses += node in chain.results[1:]
        if uses > 1:
            bytes = 3 * (uses - 1) * _size(value_of(node))
            price += Price(bytes, 0, uses - 1, profile.moving(bytes, kernels=uses - 1), (uses - 1) * profile.call)
    return price


def of_line(chain: Chain, profile: Profile, training: bool, goes_on: bool = False) -> tuple[Price, Price]:
    """A chain's line, forward and backward: a kernel for the words before a contraction, one for those behind it, and
    between them the product as it was; on the CPU, in inference, with its own product, behind which words go on.

    Args:
        goes_on: the chain itself goes on where a product ends.
    """
    parts: list[list[str]] = [[]]
    shapes = [sizes(value_of(chain.x))]
    products = [node for node in chain.nodes if (op := operation(node)) and op.name in PRODUCTS]
    for word in chain.words:
        if kind(word) in CONTRACTIONS:
            parts.append([])
        else:
            parts[-1].append(word)
    if len(parts) > 1:
        shapes = [shapes[0], sizes(value_of(products[0])), sizes(value_of(products[-1]))][: len(parts)]
    else:
        shapes = [sizes(value_of(chain.result))]
    dtype = value_of(chain.result).dtype
    operands = iter([value_of(node) for node in chain.operands])
    in_panels = has_own_product(chain, profile, training)
    forward = backward = Price()
    for node in products:
        op = operation(node)
        forward += _of_product(node, op.name, op.arguments, profile, False, in_panels)
        backward += of_node(node, profile, backward=True) if training else Price()
    for i, (words, shape) in enumerate(zip(parts, shapes)):
        if i > 0:
            next(operands)  # the contraction's
        line = _parse(" | ".join(words)) if any(word != "keep" for word in words) else None
        own = list(itertools.islice(operands, _operands_of(line) if line is not None else 0))
        if line is not None:
            there, back = of_words(line, shape, dtype, profile, own, goes_on if i == 0 else in_panels)
            forward, backward = forward + there, backward + back if training else backward
    return forward, backward


PRODUCTS = ("linear", "addmm", "matmul")


def has_own_product(chain: Chain, profile: Profile, training: bool) -> bool:
    """Whether a line with `linear` multiplies by this package's own code on the device: in panels, on the CPU. Not in
    training, where backward takes the library's products."""
    x = value_of(chain.x)
    there = str(x.dtype).removeprefix("torch.") in profile.own_products
    if training or not there or not any(kind(word) == "linear" for word in chain.words):
        return False
    line = _parse(chain.line)
    features = sizes(value_of(chain.operands[line.weight]))[0]
    return line.plan(sizes(x), x.dtype, features, device="cpu").strategy == "panels"


def _operands_of(line: Line) -> int:
    return sum(word.operands for word in line.words if word.operand != "none")


def of_words(
    line: Line,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    profile: Profile,
    operands: Sequence[Tensor] | None = None,
    goes_on: bool = False,
) -> tuple[Price, Price]:
    """A line without a contraction on rows of this shape, forward and backward with all gradients. Operands may be
    smaller than x, or have another dtype; they are x's equals if None. A line that goes on where a product ends, while
    its x is in a core's cache, writes its result in the product's place, and is no kernel of its own."""
    cost = line.cost(shape, dtype)
    less = [0, 0] if operands is None else _smaller(line, shape, dtype, operands)
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
    """Bytes that tensor operands have less than x, as often as each direction moves them."""
    less = [0, 0]
    for index in line.tensor_operands:
        whole = math.prod(shape) * dtype.itemsize
        less[0] += whole - _size(operands[index])
        less[1] += (whole - _size(operands[index])) * line.reads_operands[index]
        less[1] += whole * (not operands[index].is_floating_point())  # has no gradient
    return less


def features_of(line: Line) -> tuple[str, ...]:
    """Of `FEATURES`, those that the line has."""
    kinds = {kind(word.name) for word in line.words}
    has = {
        "softmax": "softmax" in kinds,
        "norm": bool(kinds & {"layer_norm", "rms_norm"}),
        "dropout": "dropout" in kinds,
        "column": any(word.operand == "column" for word in line.words),
        "activation": any(word.kind in ("activation", "gate") for word in line.words),
        "mean": "layer_norm" in kinds,
    }
    return tuple(feature for feature in FEATURES if has[feature])


def _count(tensor: Tensor) -> int:
    return math.prod(sizes(tensor))


def _size(tensor: Tensor) -> int:
    return _count(tensor) * tensor.itemsize
