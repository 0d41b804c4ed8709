"""A line's gradient: one forward operator, one backward operator, and what is held between them."""

from __future__ import annotations

import functools
import math
import operator
import warnings
from dataclasses import dataclass

import torch
from torch._C._functorch import get_interpreter_stack, get_unwrapped, is_gradtrackingtensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from onepass import _native
from onepass._arguments.shapes import repetition, sum_of_channels, unit_type
from onepass._operators.backward import derivative_along, run_backward
from onepass._operators.composed import Saved, cannot_be_made_again, composed_backward, refuse_twice
from onepass._operators.fake import library, no_operands
from onepass._tracing import assume_constant_result
from onepass.line import Line, _parse
from onepass.reference import compose


@functools.cache
def front():
    """What calls a line in C++ where nothing but kernels and autograd would see its tensors; None where it is neither
    built for the installed torch nor compiled, for which inference does not wait.

    It takes a line without dropout, x and the operands, and gives None for a call that is not for it.
    """
    return _native.open_autograd(may_compile=False)


@functools.cache
def differentiable():
    """The operator that does in C++ what Apply does, at a third of its cost for the host.

    Built for the installed torch, or compiled at first use, from src/torch/autograd/autograd_function.h. Without a
    compiler it is None, with one warning, and Apply serves.
    """
    try:
        _native.open_autograd()
    except RuntimeError as reason:
        warnings.warn(f"onepass: gradients take Python's way, some 20 us a call slower: {reason}", stacklevel=4)
        return None
    front.cache_clear()
    return torch.ops.onepass.differentiable.default


@functools.lru_cache(maxsize=_native.REMEMBERED)
def _plan(line: str, types: tuple[int, ...], needed: tuple[bool, ...]):
    wanted = sum(1 << bit for bit, is_needed in enumerate(needed) if is_needed)
    sources = tuple(_native.gradients(line, types[0], types[1:], wanted)["inputs"])
    return sources, wanted, any(s is not None and s >= 0 for s in sources)


forget_plans = _plan.cache_clear


@assume_constant_result
def plan(line: str, types: tuple[int, ...], needed: tuple[bool, ...]):
    """Where gradients come from, the bits of those wanted (x first), and whether the backward op writes any.

    For x and each operand: None (not wanted), -1 (the upstream gradient itself), or the backward op's output.
    """
    return _plan(line, types, needed)


_is_traced, _has_transforms = torch.compiler.is_dynamo_compiling, torch._C._are_functorch_transforms_active


def is_transformed() -> bool:
    """Whether torch.func or forward mode sees a call."""
    return not _is_traced() and (_has_transforms() or forward_ad._current_level >= 0)


def is_transformed_in_graph() -> bool:
    """Whether Dynamo captures a call within transforms of torch.func that an autograd function in its graph gets wrong
    or cannot take: forward mode, derivatives of derivatives, vmap or a gradient of what has gradients without it."""
    if not _is_traced():
        return False
    levels = _transforms()
    if levels == "Vmap":
        return torch.is_grad_enabled() and _takes_gradients()
    return levels not in _TAKEN or levels == "Grad" and _takes_gradients()


# Before torch 2.12 jacobians, whose backward is what vmap sees, are zeros.
_TAKEN = ("", "Grad") if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12) else ("",)


@assume_constant_result
def _transforms() -> str:
    return ",".join(level.key().name for level in get_interpreter_stack() or ())


@assume_constant_result
def _takes_gradients() -> bool:
    """Whether what the graph takes, as far as it has been captured, has gradients. Tensors within a transform do not
    say it of what they are made of."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    captured = InstructionTranslator.current_tx().output
    given = [
        node for graph in {captured.root_tracer.graph, captured.graph} for node in graph.find_nodes(op="placeholder")
    ]
    return any(getattr(node.meta.get("example_value"), "requires_grad", False) for node in given)


def alive(tensors):
    """The same tensors outside of torch.func, without what is left of a level that has ended: a value that leaves
    `torch.func.grad` by another way than as its result is wrapped still, and need not say that it has a gradient."""
    return tuple(map(_unwrapped, tensors)) if any(map(is_gradtrackingtensor, tensors)) else tensors


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    while is_gradtrackingtensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def is_jit_traced() -> bool:
    """Whether torch.jit.trace sees a call: its graph is the same with gradients and without, as of torch's own."""
    return not _is_traced() and torch.jit.is_tracing()


# Functions below take a call as these: the line, the dropout state, how many tensors a list has (0: one tensor, no
# list), the bits of the operands of which each tensor of the list has its own, whether results are stacked; then the
# tensors, first x (of the list's tensors, each), then of each operand one for all, or one for each.


def places_of(line, count, own) -> list[tuple[int, int]]:
    """Where the tensors of x, then of each operand, begin and end."""
    end = count or 1
    places = [(0, end)]
    for i in range(line.operand_count):
        begin, end = end, end + (count if own >> i & 1 else 1)
        places.append((begin, end))
    return places


def forward(line, state, count, own, stack, tensors, save: bool):
    """The forward operator: results, kept values, and to save what `linear` gives and the row statistics."""
    first = count or 1
    operands = tensors[first:] or no_operands(tensors[0])
    if count:
        op, save = torch.ops.onepass.group_forward.default, save and line.reads_statistics
        return op(tensors[:count], operands, line.text, state, save, own, stack)
    if line.weight is not None:
        return line.forward_op(tensors[0], operands, line.text, state, save)
    if line.rowwise:
        return line.forward_op(tensors[0], operands, line.text, state, save and line.reads_statistics)
    return line.forward_op(tensors[0], operands, line.text, state)


def run(line, state, count, own, stack, *tensors):
    """What forward gives where it is to be differentiated."""
    return tuple(forward(line, state, count, own, stack, tensors, True))


def save(ctx, inputs, output, everything=False):
    """Saves what backward reads; or everything, for forward mode too, of one tensor."""
    line, state, count, own, stack, *tensors = inputs
    members = count or 1
    kinds = 1 if stack else members
    results = (1 + line.keeps) * kinds
    places = places_of(line, count, own)
    ctx.of = (line, count, own, stack)
    codes = [i for i in range(results) if not line.differentiable[i // kinds]]
    ctx.mark_non_differentiable(*[output[i] for i in codes], *output[results:])
    ctx.set_materialize_grads(False)
    ctx.results = [(r.shape, tensors[0].dtype if i in codes else r.dtype) for i, r in enumerate(output[:results])]
    ctx.device = tensors[0].device
    rows, channels, types = {}, {}, [_native.DTYPES[tensors[0].dtype]]
    for i, (begin, end) in enumerate(places[1:]):
        type_of = _native.DTYPES[tensors[begin].dtype]
        is_tensor = i in line.tensor_operands and not _are_whole(line, i, tensors, members, tensors[begin:end])
        if is_tensor or i in line.column_operands and tensors[begin].dim() > 1:
            rows[i] = [t.shape for t in tensors[begin:end]]
            is_one = line.weight is None and not count
            type_of += repetition(tensors[begin].shape, tensors[0].shape) if is_one else _native.BROADCAST
        if i in line.channel_operands:
            channels[i] = [(t.shape, t.dtype) for t in tensors[begin:end]]
            type_of += min(unit_type(tensors[0].shape[-1] // t.shape[-1]) for t in tensors[begin:end])
        types.append(type_of)
    ctx.types, ctx.broadcast, ctx.channels = tuple(types), rows, channels

    for_weight = line.weight is not None and ctx.needs_input_grad[5 + places[1 + line.weight][0]]
    reads_x = everything or line.reads_x and (for_weight or not line.x_for_weight)
    xs = [x if reads_x else None for x in tensors[:members]] if line.reads_x or not count else []
    k, behind = line.resumes_from, line.resumes_behind
    resumed = [] if k is None else output[k * kinds : (k + 1) * kinds]
    operands = []
    for read, only_for_it, (begin, end) in zip(line.reads_operands, line.operands_for_weight, places[1:]):
        is_read = everything or read and (for_weight or not only_for_it)
        operands += tensors[begin:end] if is_read else [None] * (end - begin)
    statistics = output[-1] if line.reads_statistics else None
    product = output[1 + line.keeps] if line.reads_product else None
    saved = (state, statistics, product, None if behind is None else output[behind], *operands, *xs, *resumed)
    ctx.save_for_backward(*saved)
    if everything:
        ctx.save_for_forward(*saved)


def _are_whole(line, i, tensors, members, own) -> bool:
    """Whether a tensor operand has the shape of what its word stands at, for each tensor of the call."""
    if len(own) != members:
        return False
    shapes = [x.shape for x in tensors[:members]]
    if line.is_behind(i):
        shapes = [line.shape_behind(tensors[0], tensors[1:])]
    return all(o.shape == shape for o, shape in zip(own, shapes))


def gradients(ctx, upstream):
    """Of the tensors, those that are needed."""
    line, count, own, stack = ctx.of
    upstream = upstream[: len(ctx.results)]
    if not all(line.differentiable):  # Dynamo makes gradients of what has none
        kinds = len(ctx.results) // len(line.differentiable)
        upstream = [g if line.differentiable[i // kinds] else None for i, g in enumerate(upstream)]
    members, places = count or 1, places_of(line, count, own)
    needed = ctx.needs_input_grad[5:]
    of_kinds = tuple(any(needed[begin:end]) for begin, end in places)
    sources, wanted, writes = plan(line.text, ctx.types, of_kinds)
    given = [_zeros(shape, of, ctx.device, count) if g is None else g for g, (shape, of) in zip(upstream, ctx.results)]
    written = ()
    if writes:
        how = Gradient(line, ctx.types, wanted, count, own, stack)
        written = run_backward(how, *given, *ctx.saved_tensors)
    firsts = _firsts(line, members, sources, places)
    reached = [reached_by(upstream if stack else upstream[i::members]) for i in range(members)]
    results = [None] * len(needed)
    for kind, (source, (begin, end)) in enumerate(zip(sources, places)):
        if source is None:
            continue
        found = written[firsts[source] :] if source >= 0 else given[0].unbind() if stack else given[:members]
        if (of := ctx.channels.get(kind - 1)) is not None:
            found = [sum_of_channels(g, *like) for g, like in zip(found, of)]
        elif (shapes := ctx.broadcast.get(kind - 1)) is not None:
            found = [g.sum_to_size(shapes[i if len(shapes) > 1 else 0]) for i, g in enumerate(found[:members])]
            if end - begin < members:  # an operand that is rows, and one for all
                found = [functools.reduce(operator.add, found)]
        keeps = 0 if kind == 0 else line.keeps_before[kind - 1]
        for i in range(begin, end):
            is_reached = keeps < (reached[i - begin] if end - begin == members else max(reached))
            results[i] = found[i - begin] if needed[i] and is_reached else None
    return None, None, None, None, None, *results


def _zeros(shape, dtype, device, count):
    """In the place of a gradient that nobody gave. In a list they are as dense as the others: they share a launch."""
    return torch.zeros(shape if count else (), dtype=dtype, device=device).expand(shape)


def _firsts(line, members, sources, places) -> list[int]:
    """The first tensor of each of the backward operator's outputs, which is one for each tensor but for columns that
    all share."""
    counts = {}
    for kind, source in enumerate(sources):
        if source is not None and source >= 0:
            is_row = kind == 0 or kind - 1 in line.tensor_operands
            counts[source] = members if is_row else places[kind][1] - places[kind][0]
    firsts, total = [], 0
    for output in range(len(counts)):
        firsts.append(total)
        total += counts[output]
    return firsts


def reached_by(upstream) -> int:
    """How many keeps the gradients reach: operands with fewer keeps before them get a gradient. If the result has none,
    operands behind the last kept value that has one get none either, as with PyTorch's operators."""
    if upstream[0] is not None:
        return len(upstream) + 1
    reached = [i for i, g in enumerate(upstream) if g is not None]
    return reached[-1] if reached else 0


@dataclass(frozen=True)
class Gradient:
    """What a backward operator is told besides tensors."""

    line: Line
    types: tuple[int, ...]
    """Of x, then of the operands."""
    wanted: int
    """Bit 0: x's gradient, bit i + 1: operand i's."""
    count: int = 0
    own: int = 0
    stack: bool = False

    def run(self, *tensors):
        """tensors: the gradients of the results and of the kept values, then what was saved."""
        line = self.line
        given, state, statistics, product, resumed_behind, operands, xs, resumed = self._sorted(tensors)
        rest = (state, line.text, self.types[1:], self.wanted)
        if self.count:
            op = torch.ops.onepass.group_backward.default
            return tuple(op(given, xs, operands, resumed, statistics, *rest, self.own, self.stack))
        x, resumed = xs[0], resumed[0] if resumed else None
        if line.weight is not None:
            if not self.wanted >> 1 + line.weight & 1:  # what is there for forward mode alone must not choose the way
                x = None if line.x_for_weight else x
                operands = [None if only else o for o, only in zip(operands, line.operands_for_weight)]
            rest = (state, line.text, self.types, self.wanted)
            return tuple(line.backward_op(given, x, operands, resumed, statistics, product, resumed_behind, *rest))
        if line.rowwise:
            return tuple(line.backward_op(given, x, operands, resumed, statistics, *rest))
        return tuple(line.backward_op(given, x, operands, resumed, *rest))

    def watched(self, tensors):
        """The same tensors, so that what cannot be differentiated again says so: a product that cannot be made again
        has no graph, and a gradient made of it would be taken for a constant. torch.func asks for a graph always, and
        hears of it where that is differentiated.

        Raises:
            RuntimeError: for such a product, outside of torch.func: nothing leads from it to the tensors that it was
                made of, and where something else of the gradient does, it alone would be differentiated.
        """
        given, state, statistics, product, *rest = self._sorted(tensors)
        if product is None or not cannot_be_made_again(self.line, self._each(tensors)[0][1]):
            return tensors
        if torch._C._functorch.peek_interpreter_stack() is None:
            refuse_twice(self.line)
        at = len(given) + 2
        return (*tensors[:at], tensors[at].detach().requires_grad_(), *tensors[at + 1 :])

    def compose(self, *tensors):
        """The same of PyTorch's operators: each tensor by itself; the gradients of what a list shares are sums."""
        each, first_row = [], 0
        for upstream, saved in self._each(tensors):
            each.append(composed_backward(self.line, upstream, saved, self.types, self.wanted, first_row))
            first_row += math.prod(upstream[0].shape[:-1])
        if not self.count:
            return each[0]
        written = []
        outputs = _native.gradients(self.line.text, self.types[0], self.types[1:], self.wanted)["outputs"]
        for output, some in zip(outputs, zip(*each)):
            operand = output["input"] - 1
            is_row = operand < 0 or operand in self.line.tensor_operands
            written += some if is_row or self.own >> operand & 1 else [sum(some)]
        return tuple(written)

    def _each(self, tensors) -> list:
        """Of each tensor: its upstream gradients, and what was saved."""
        given, state, _, product, resumed_behind, operands, xs, resumed = self._sorted(tensors)
        members = self.count or 1

        def of_kinds(some, i):  # of each kind a tensor that is stacked, or one for each
            kinds = some if self.stack else [some[k : k + members] for k in range(0, len(some), members)]
            return [kind[i] for kind in kinds]

        places = [(begin - members, end - members) for begin, end in places_of(self.line, self.count, self.own)[1:]]
        each = []
        for i in range(members):
            own = tuple(operands[begin + (i if end - begin > 1 else 0)] for begin, end in places)
            kept = next(iter(of_kinds(resumed, i)), None)
            saved = Saved(xs[i] if xs else None, kept, state, product, resumed_behind, own)
            each.append((of_kinds(given, i), saved))
        return each

    def _sorted(self, tensors):
        """The gradients, then as `save` has them: the dropout state, the statistics, the product, the result to resume
        from behind it, the operands, x, and what backward resumes from."""
        line, members = self.line, self.count or 1
        kinds = 1 if self.stack else members
        tensors = list(tensors)

        def taken(count):
            some = tensors[:count]
            del tensors[:count]
            return some

        given = taken((1 + line.keeps) * kinds)
        one_each = taken(4)
        operands = taken(places_of(line, self.count, self.own)[-1][1] - members)
        xs = taken(members if line.reads_x or not self.count else 0)
        return given, *one_each, operands, xs, tensors


# C++ calls it where a gradient may be differentiated.
library.define(
    "differentiable_backward(Tensor[] gradients, Tensor?[] saved, str line, int[] types, int wanted, int count, "
    "int own, bool stack) -> Tensor[]"
)


@torch.library.impl(library, "differentiable_backward", "CompositeImplicitAutograd")
def _(gradients, saved, line, types, wanted, count, own, stack):
    return list(run_backward(Gradient(_parse(line), tuple(types), wanted, count, own, stack), *gradients, *saved))


def apply(function, *inputs):
    """`function.apply` in eager calls. Results become those of a subclass of Tensor here, as behind an operator: within
    the function they would be views, which autograd lets nobody overwrite."""
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    if has_torch_function(tensors):
        return handle_torch_function(apply, tensors, function, *inputs)
    return function.apply(*inputs)


class Apply(torch.autograd.Function):
    """Runs a line so that it can be differentiated, in terms that torch.compile can trace.

    Saved for backward: of x and the operands only those that backward reads, a kept value or the result in x's place
    where the line can resume from it, the row statistics, and the dropout state (two integers). Never a normalised row,
    an activation or a mask.
    """

    @staticmethod
    def forward(ctx, *inputs):
        """inputs: a call, as above."""
        results = run(*inputs)
        save(ctx, inputs, results)
        return results

    @staticmethod
    def backward(ctx, *upstream):
        """Gradients of the tensors, those that are needed."""
        return gradients(ctx, upstream)


class Transformable(Apply):
    """The same, of one tensor, for torch.func's transforms and for forward mode, which want forward and its context
    apart (that costs every call more). Forward mode has no kernel: its derivatives are those of the reference."""

    generate_vmap_rule = True
    forward = staticmethod(run)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Saves the same for both modes, as vmap has it."""
        save(ctx, inputs, output, everything=True)
        ctx.outputs = len(output)

    @staticmethod
    def jvp(ctx, *tangents):
        """Of the result and of the kept values."""
        line = ctx.of[0]
        state, _, _, _, *rest = ctx.saved_tensors
        operands, x = rest[: line.operand_count], rest[line.operand_count]

        places = [i for i, is_smooth in enumerate(line.differentiable) if is_smooth]

        def run(*tensors):
            results = compose(line.words, tensors[0], tensors[1:], state)
            return tuple(results[i] for i in places)

        found = dict(zip(places, derivative_along(tangents[5:], run, (x, *operands)) if places else ()))
        return tuple(found.get(i) for i in range(ctx.outputs))
