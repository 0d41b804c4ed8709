"""The operators as PyTorch's tracing sees them: outputs without data, with the strides that the kernels give."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from torch._library.utils import get_layout_constraint_tag

from onepass import _native
from onepass._arguments.shapes import sizes_of_sum
from onepass._operators.composed import OF_DTYPE, like_x

library = torch.library.Library("onepass", "FRAGMENT")
names: list[str] = []  # of the operators that have a fake


def _fake(name: str) -> Callable:
    """Registers the function below it as the fake of an operator."""

    def register(function):
        @functools.wraps(function)
        def traced(*inputs):
            if "torch._inductor.lowering" in sys.modules:
                _say_to_inductor()
            return function(*inputs)

        names.append(name)
        torch.library.register_fake(f"onepass::{name}", traced, lib=library)
        return function

    return register


@functools.cache
def _say_to_inductor() -> None:
    """Says that the operators are called as they are. Where Inductor finds out by itself, it writes down all of an
    operator's arguments with what made them (torch 2.11): behind thirty products that are read twice, it never ends."""
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint

    for name in names:
        operator = getattr(torch.ops.onepass, name).default
        if operator not in lowerings:
            tag = get_layout_constraint_tag(operator, with_default=True)
            make_fallback(operator, layout_constraint=tag_to_layout_constraint(tag), warn=False)


def no_operands(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a line without operands is given for them. In a traced graph x stands there, which no operator reads:
    AOTInductor makes none of an empty list (torch 2.15)."""
    return (x,) if torch.compiler.is_compiling() else ()


def _require_device(x: torch.Tensor, line: str, operands, own: int = 0, count: int = 1) -> None:
    """Raises as PyTorch does where an operand is not where x is: an operator has one kernel for all of its tensors."""
    if any(o.device != x.device for o in operands):
        for name, (begin, end) in zip(_operand_names(line), places_of_operands(own, line, count)):
            for o in operands[begin:end]:
                _require_same(x.device, name, o)


def _operand_names(line: str) -> list[str]:
    """As the kernels' messages have them."""
    takers = [w for w in _native.describe(line)["words"] if w["operand"] != "none"]
    names = [f"{name} of '{w['name']}'" for w in takers for name in w["operand_name"].split(", ")]
    return [f"operand {i} ({name})" for i, name in enumerate(names)]


def _require_devices(gradients, *saved) -> None:
    """The same of a backward operator's tensors."""
    of_x = gradients[0].device
    for given, name in ((gradients, "a gradient"), *((some, "a tensor that backward reads") for some in saved)):
        for t in given if isinstance(given, (list, tuple)) else [given]:
            if t is not None:
                _require_same(of_x, name, t)


def _require_same(of_x: torch.device, name: str, t: torch.Tensor) -> None:
    if t.device != of_x:
        raise RuntimeError(
            f"onepass: Expected all tensors to be on the same device, but x is on {of_x} and {name} is on {t.device}"
        )


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _results(x: torch.Tensor, line: str, front: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Of x's shape, or one number a row."""
    kinds = zip(_native.result_shapes(line, x.shape), _native.result_dtypes(line, x.dtype))
    return [x.new_empty((*front, *shape), dtype=dtype) for shape, dtype in kinds]


def _statistics(x: torch.Tensor, line: str) -> torch.Tensor:
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    count = "statistics_of_16_bits" if x.dtype.itemsize == 2 else "statistics"
    return x.new_empty((_native.describe(line)[count], rows), dtype=_arithmetic(x.dtype))


def order_of(like: torch.Tensor) -> tuple[int, ...]:
    """The dimensions in the order in which results of attention have them, outermost first: that of their tensor, the
    queries or one that has a gradient; as they are where its rows are not contiguous or it is broadcast. The kernels
    have the same rule (src/torch/attention/order.cc)."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # takes sympy, which takes a while

    order, strides = list(range(like.dim())), like.stride()
    if not guard_or_false(strides[-1] == 1) or any(guard_or_false(stride == 0) for stride in strides):
        return tuple(order)
    for end in range(1, len(order) - 1):
        at = end
        while at > 0 and guard_or_false(strides[order[at]] > strides[order[at - 1]]):
            order[at - 1], order[at] = order[at], order[at - 1]
            at -= 1
    return tuple(order)


def empty_in_order(like: torch.Tensor, columns: int, of: torch.Tensor) -> torch.Tensor:
    """like's sizes, but for the last, in its order of dimensions."""
    order, sizes = order_of(like), (*like.shape[:-1], columns)
    return of.new_empty([sizes[dim] for dim in order]).permute([order.index(dim) for dim in range(like.dim())])


@_fake("elementwise_forward")
def elementwise_results(x, operands, line, dropout_state):
    _require_device(x, line, operands)
    return _results(x, line)


@_fake("rowwise_forward")
def rowwise_results(x, operands, line, dropout_state, save_statistics):
    _require_device(x, line, operands)
    results = _results(x, line)
    if save_statistics:
        results.append(_statistics(x, line))
    return results


@_fake("linear_forward")
@_fake("scores_forward")
@_fake("attention_forward")
def contraction_results(x, operands, line, dropout_state, save):
    facts = _native.describe(line)
    _require_device(x, line, operands)
    weight = operands[facts["weight"]]

    def behind():
        return weight.new_empty((*x.shape[:-1], weight.shape[-2]))

    def result(i):
        if facts["numbers"][i]:
            return weight.new_empty(x.shape[:-1], dtype=_arithmetic(weight.dtype))
        return x.new_empty(x.shape) if 0 < i <= facts["keeps_before"] else behind()

    results = [result(i) for i in range(1 + facts["keeps"])]
    if facts["values"]:
        results[0] = empty_in_order(x, operands[-1].shape[-1], weight)
    if save and facts["reads_product"]:
        results.append(behind())
    if save and facts["reads_statistics"]:
        results.append(_statistics(results[0] if facts["scores"] else x, line))
    return results


def gradients_of(like: torch.Tensor, line: str, operand_types: list[int], wanted: int) -> list[torch.Tensor]:
    """like: of x's shape and dtype."""
    plan = _native.gradients(line, _native.DTYPES[like.dtype], tuple(operand_types), wanted)
    columns = like.shape[-1] if like.dim() else 1

    def shape(output):
        if not output["column"]:
            return like.shape
        *sizes, last = (columns,) if output["has"] < 0 else sizes_of_sum(like.shape, output["has"])
        return (*sizes, last // output["unit"])

    return [like.new_empty(shape(output), dtype=OF_DTYPE[output["dtype"]]) for output in plan["outputs"]]


@_fake("elementwise_backward")
def _(gradients, x, operands, resumed, dropout_state, line, operand_types, wanted):
    _require_devices(gradients, x, operands, resumed)
    return gradients_of(gradients[0], line, operand_types, wanted)


@_fake("rowwise_backward")
def _(gradients, x, operands, resumed, statistics, dropout_state, line, operand_types, wanted):
    _require_devices(gradients, x, operands, resumed, statistics)
    return gradients_of(like_x(line, gradients, x, resumed), line, operand_types, wanted)


@_fake("linear_backward")
@_fake("scores_backward")
@_fake("attention_backward")
def _(gradients, x, operands, resumed, statistics, product, resumed_behind, dropout_state, line, types, wanted):
    _require_devices(gradients, x, operands, resumed, statistics, product, resumed_behind)
    return _gradients_of_contraction(gradients[0], operands, line, types, wanted, x)


def _gradients_of_contraction(dy, operands, line, types, wanted, x=None):
    facts = _native.describe(line)
    weight = operands[facts["weight"]]
    rows = dy.shape if facts["numbers"][0] else dy.shape[:-1]

    def like(output):
        index = output["input"] - 1  # of the operand; -1: x
        if index == facts["weight"] or (facts["values"] and index == len(operands) - 1):
            return operands[index].shape
        columns = weight.shape[-2 if index > facts["weight"] else -1]
        return (columns,) if output["column"] else (*rows, columns)

    def gradient(output):
        dtype, index = OF_DTYPE[output["dtype"]], output["input"]
        of = {0: x, 1: operands[0], len(operands): operands[-1]}.get(index) if facts["values"] else None
        if of is None:
            return dy.new_empty(like(output), dtype=dtype)
        return empty_in_order(of, of.shape[-1], dy).to(dtype)

    plan = _native.gradients(line, types[0], tuple(types[1:]), wanted)
    return [gradient(output) for output in plan["outputs"]]


@_fake("linear_forward_with_gradients")
def _(x, operands, line, dropout_state, gradients, types, wanted):
    numbers = contraction_results(x, operands, line, dropout_state, False)
    return numbers + _gradients_of_contraction(gradients[0], operands, line, types, wanted)


@_fake("times_")
def _(x, factor):
    return None


def places_of_operands(own: int, line: str, count: int) -> list[tuple[int, int]]:
    """Where in a list those of each operand begin and end: one for all tensors, or one for each of them."""
    places, end = [], 0
    for i in range(len(_native.describe(line)["reads_operands"])):
        begin, end = end, end + (count if own >> i & 1 else 1)
        places.append((begin, end))
    return places


@_fake("group_forward")
def group_results(xs, operands, line, dropout_state, save, own, stack):
    count = len(xs)
    for i, x in enumerate(xs):
        _require_same(xs[0].device, f"element {i} of x", x)
    _require_device(xs[0], line, operands, own, count)
    if stack:
        results = _results(xs[0], line, (count,))
    else:
        results = [result for kind in zip(*[_results(x, line) for x in xs]) for result in kind]
    if save and _native.describe(line)["reads_statistics"]:
        numbers = sum(_statistics(x, line).numel() for x in xs)
        results.append(xs[0].new_empty((numbers,), dtype=_arithmetic(xs[0].dtype)))
    return results


@_fake("group_backward")
def _(gradients, xs, operands, resumed, statistics, dropout_state, line, operand_types, wanted, own, stack):
    _require_devices(gradients, xs, operands, resumed, statistics)
    count = gradients[0].shape[0] if stack else len(gradients) // (1 + _native.describe(line)["keeps"])
    if _native.describe(line)["numbers"][0] and xs:
        members = xs
    else:
        kind = resumed if _native.describe(line)["numbers"][0] else gradients
        members = list(kind[0].unbind()) if stack else kind[:count]
    each = [gradients_of(like, line, operand_types, wanted) for like in members]
    plan = _native.gradients(line, _native.DTYPES[members[0].dtype], tuple(operand_types), wanted)
    results = []
    for output, some in zip(plan["outputs"], zip(*each)):
        is_shared = output["column"] and not own >> output["input"] - 1 & 1
        results += some[:1] if is_shared else some
    return results


# The draw is an operator of its own so that a compiled graph makes the same one as eager mode does.
library.define("dropout_state(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def draw_dropout_state(like: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """int64 {seed, offset} on the tensor's device, from its generator: what one call's dropout masks depend on."""
    return torch.empty(2, dtype=torch.int64, device=like.device).random_(generator=generator)


library.impl("dropout_state", draw_dropout_state, "CompositeExplicitAutograd")


@_fake("dropout_state")
def _(like):
    return like.new_empty((2,), dtype=torch.int64)


def _as_read(t: torch.Tensor | None) -> torch.Tensor | None:
    """What a view that is negated lazily, or zeros without a storage, are when they are read."""
    if t is None or not (t.is_neg() or t._is_zerotensor()):
        return t
    return torch.zeros((), dtype=t.dtype, device=t.device).expand(t.shape) if t._is_zerotensor() else t.resolve_neg()


def _refuse_batches(*_):
    raise RuntimeError(
        "onepass: torch's older vmap (is_grads_batched of torch.autograd.grad, vectorize=True of "
        "torch.autograd.functional) has no rules for these operators; use torch.func.vmap, torch.func.jacrev or "
        "torch.func.hessian"
    )


def _register_keys(name: str) -> None:
    op = getattr(torch.ops.onepass, f"{name}_backward").default

    def run(*arguments):
        return op(*torch.utils._pytree.tree_map_only(torch.Tensor, _as_read, arguments))

    # torch reads such tensors itself, but not in a list of perhaps a tensor.
    for key in ("Negative", "ZeroTensor"):
        library.impl(f"{name}_backward", run, key)
    for direction in ("forward", "backward"):
        library.impl(f"{name}_{direction}", _refuse_batches, "Batched")


for _name in ("elementwise", "rowwise", "linear", "scores", "attention", "group"):
    _register_keys(_name)
