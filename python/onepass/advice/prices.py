"""What a captured graph's nodes cost as PyTorch runs them, and what a line costs in their place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from onepass import _native
from onepass.advice.counting import Counts
from onepass.advice.kernels import Kernel
from onepass.advice.nodes import counts_of
from onepass.advice.profile import FEATURES, Profile
from onepass.line import Line, _parse
from onepass.plan import Plan
from onepass.rewrite.chains import Chain
from onepass.rewrite.operations import is_tensor, operation, sizes, value_of
from onepass.rewrite.steps import CONTRACTIONS, kind

__all__ = [
    *(
        "Price",
        "decision",
        "features_of",
        "has_own_product",
        "is_worth_it",
        "joined_gradients",
        "of_chain",
        "of_counts",
    ),
    *("of_line", "of_node", "of_words"),
]

BACKWARD: dict[str, tuple[int, int]] = {
    "add": (0, 0),
    **dict.fromkeys(("pow", "square", "sqrt", "rsqrt", "erf", "relu", "tanh", "sigmoid", "silu", "mish"), (2, 1)),
    **dict.fromkeys(("hardswish", "softplus", "gelu", "elu", "leaky_relu", "softmax", "dropout"), (2, 1)),
    **dict.fromkeys(("exp", "expm1", "log", "log1p", "sin", "cos", "sinh", "cosh", "atan", "abs"), (2, 1)),
    **dict.fromkeys(("layer_norm", "rms_norm"), (2, 1)),
    **dict.fromkeys(("cast", "mean", "var", "sub"), (1, 1)),
    **dict.fromkeys(("mul", "div"), (1, 1)),
}
"""How many tensors of its input's size the backward of an operator reads and writes that has a rate by its name. A
product of two tensors has (3, 2). All other operators are counted by calling them."""
RATES = {"mul": "add", "sub": "add", "div": "add", "cast": "add", "mish": "gelu", "softplus": "gelu", "erf": "gelu"}


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
    if op is None or op.name not in BACKWARD:
        return of_counts(counts_of(node, backward), profile, backward)
    result = value_of(node)
    if backward and not result.requires_grad:
        return Price()
    inputs = [value_of(a) for a in op.arguments if is_tensor(a)]
    if node.meta.get("onepass_bias"):  # part of the product before it; its gradient is a sum over rows
        if backward:
            return _moved(_size(result), _count(result), profile, "sum", result, False)
        return Price(_size(inputs[1]), seconds=_size(inputs[1]) / profile.bandwidth)
    name = RATES.get(op.name, op.name)
    if not backward:
        bytes = sum(map(_size, inputs)) + _size(result)
        bytes += _count(result) if op.name == "dropout" else 0  # its mask
        return _moved(bytes, 4 * _count(result), profile, name, result, False)
    bytes = _moved_backward(op.name, inputs, result)
    return _moved(bytes, 8 * _count(result), profile, name, result, True) if bytes else Price()


def _moved_backward(name: str, inputs: Sequence[Tensor], result: Tensor) -> float:
    """What an element-wise operator's backward moves for those of its inputs that have gradients."""
    reads, writes = BACKWARD[name]
    learns = [tensor.requires_grad for tensor in inputs]
    if name in ("mul", "div") and len(inputs) == 2:
        reads, writes = 1 + sum(learns), sum(learns)
    elif name == "add" or name == "sub" and learns[1:] != [True]:
        reads = writes = 0
    elif name != "sub":
        writes -= not learns[0]
    smaller = [tensor for tensor in inputs if tensor.requires_grad and 0 < _count(tensor) < _count(result)]
    bytes = max(map(_size, inputs), default=0) * (reads + writes)
    return bytes + len(smaller) * _size(result) * (name in ("add", "mul"))


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


def of_chain(chain: Chain, profile: Profile, training: bool, whole: bool = True) -> tuple[Price, Price]:
    """The nodes that a line stands for as they are, forward and backward; without those that are done beside it as
    well, if not `whole`."""
    beside = set() if whole else set(_beside(chain))
    nodes = [node for node in sorted(chain.nodes) if node not in beside]
    forward = sum((of_node(node, profile) for node in nodes), Price())
    if not training:
        return forward, Price()
    backward = sum((of_node(node, profile, backward=True) for node in nodes), Price())
    return forward, backward + joined_gradients(chain, profile)


def decision(chain: Chain, profile: Profile, training: bool, goes_on: bool = False) -> tuple[Price, Price]:
    """What `fuse` decides by and reports: the nodes of a chain now, and its line, forward and backward together. What
    is done beside the line as well, views that copy and the products of attention, is in neither.

    Args:
        goes_on: as for :func:`of_line`.
    """
    before = of_chain(chain, profile, training, whole=False)
    after = of_line(chain, profile, training, goes_on, whole=False)
    return before[0] + before[1], after[0] + after[1]


def is_worth_it(before: Price, after: Price) -> bool:
    """Whether what is saved can be seen."""
    saved = before.seconds - after.seconds
    return bool(before.kernels) and saved > WORTH * before.seconds and before.bytes >= LEAST_BYTES


WORTH = 0.05
LEAST_BYTES = 1 << 14
"""Of tables of positions and the like: what they take is not seen."""


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


def of_line(
    chain: Chain, profile: Profile, training: bool, goes_on: bool = False, whole: bool = True
) -> tuple[Price, Price]:
    """A chain's line, forward and backward: a kernel for the words before a contraction, one for those behind it, and
    between them the product as it was, less what a strategy of `linear` saves of that; on the CPU, in inference, with
    its own product, behind which words go on.

    Args:
        goes_on: the chain itself goes on where a product ends.
        whole: with what is done beside the line.
    """
    parts: list[list[str]] = [[]]
    shapes = [sizes(value_of(chain.x))]
    products = sorted(node for node in chain.nodes if (op := operation(node)) and op.name in PRODUCTS)
    trains = training and value_of(chain.result).requires_grad
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
    beside = set(_beside(chain))
    for node in sorted(beside.union(products) if whole else set(products) - beside):
        forward += _of_own_product(node, profile) if in_panels and node in products else of_node(node, profile)
        backward += of_node(node, profile, backward=True) if training else Price()
    for i, (words, shape) in enumerate(zip(parts, shapes)):
        if i > 0:
            next(operands)  # the contraction's
        line = _parse(" | ".join(words)) if any(word != "keep" for word in words) else None
        own = list(itertools.islice(operands, _operands_of(line) if line is not None else 0))
        if line is not None:
            learns = [i > 0 or value_of(chain.x).requires_grad, *(operand.requires_grad for operand in own)]
            there, back = of_words(line, shape, dtype, profile, own, goes_on if i == 0 else in_panels, learns)
            forward, backward = forward + there, backward + back if trains else backward
    if any(kind(word) == "linear" for word in chain.words):
        forward = replace(forward, seconds=forward.seconds - seconds_saved(chain, profile, training))
    return forward, backward


PRODUCTS = ("linear", "addmm", "matmul")
VIEWS = ("same", "view", "swapped")
"""They are done beside a line, too: some copy."""


def _beside(chain: Chain) -> list[fx.Node]:
    """Views, and the products of attention; the product of `linear` is the line's own."""
    linear = any(kind(word) == "linear" for word in chain.words)
    names = VIEWS if linear else (*VIEWS, *PRODUCTS)
    return [node for node in chain.nodes if (op := operation(node)) is not None and op.name in names]


def _of_own_product(node: fx.Node, profile: Profile) -> Price:
    """A linear layer, computed in panels by this package."""
    of_layer = of_counts(counts_of(node, training=False), profile)
    weight = value_of(operation(node).arguments[1])
    seconds = profile.multiplying_itself(of_layer.flops, _size(weight), weight.dtype)
    computing = seconds - profile.moving(2 * _size(weight))
    return replace(of_layer, kernels=1, seconds=seconds, host_seconds=profile.call, computing=computing)


def has_own_product(chain: Chain, profile: Profile, training: bool) -> bool:
    """Whether a line with `linear` multiplies by this package's own code on the device: in panels, on the CPU. Not in
    training, where backward takes the library's products."""
    there = str(value_of(chain.x).dtype).removeprefix("torch.") in profile.own_products
    if training or not there or not any(kind(word) == "linear" for word in chain.words):
        return False
    return _plan(chain, "cpu", training).strategy == "panels"


def seconds_saved(chain: Chain, profile: Profile, training: bool) -> float:
    """What the strategy of a line with `linear` saves on the device, forward, against the library's product between two
    kernels: none where the way's time is not predicted."""
    if profile.chip is None:
        return 0.0
    plan = _plan(chain, profile.chip, training)
    times = {way.name: way.seconds for way in plan.alternatives}
    unfused, chosen = times["unfused"], times[plan.strategy]
    return unfused - chosen if unfused is not None and chosen is not None else 0.0


def _plan(chain: Chain, chip: str, training: bool) -> Plan:
    line, x = _parse(chain.line), value_of(chain.x)
    features = sizes(value_of(chain.operands[line.weight]))[0]
    return line.plan(sizes(x), x.dtype, features, device=chip, training=training)


def _operands_of(line: Line) -> int:
    return sum(word.operands for word in line.words if word.operand != "none")


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
        less[0] += whole - _size(operands[index])
        less[1] += (whole - _size(operands[index])) * line.reads_operands[index]
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
    """Of a tensor's elements in memory: those that are repeated count once."""
    places = zip(sizes(tensor), tensor.stride())
    repeated = math.prod(size for size, stride in places if isinstance(stride, int) and stride == 0 and size > 1)
    return _count(tensor) // repeated * tensor.itemsize
