"""Runs a program by eager PyTorch or compiled, and observes all that a caller can see."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch._dynamo import guards
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor import compile_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from fuzz.program.programs import Program
from fuzz.run.masks import Masks
from onepass.rewrite.modes import Modes

__all__ = ["BEFORE_2_12", "Call", "Observation", "Way", "calls_of", "observe", "prepared"]


BEFORE_2_12 = torch.__version__ < "2.12"


@dataclass(frozen=True)
class Call:
    """One of the calls that follow one another."""

    length: int
    mode: str
    index: int

    @property
    def training(self) -> bool:
        return self.mode in ("training", "autocast")


MODES = {
    "training": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@dataclass
class Observation:
    """What one call did. Tensors are copies from before anything else ran; `left_in` are the modes that the call or its
    backward left otherwise than they were."""

    error: str | None = None
    message: str = ""
    results: list[Any] = field(default_factory=list)
    layouts: list[Any] = field(default_factory=list)
    sharing: list[Any] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    gradient_error: str | None = None
    second: dict[str, Any] = field(default_factory=dict)
    second_error: str | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    left_in: Modes | None = None


def calls_of(program: Program) -> list[Call]:
    """Two, or one at every length, in each of the modes."""
    lengths = program.lengths if len(program.lengths) > 1 else program.lengths * 2
    ways = [(mode, n) for mode in program.modes for n in lengths]
    return [Call(n, mode, i) for i, (mode, n) in enumerate(ways)]


Way = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes of a function or a module what is called in its place."""


def observe(program: Program, way: Way, calls: list[Call], masks: Masks) -> list[Observation]:
    """All calls of one function or module that `way` makes of the program."""
    torch.manual_seed(7)
    made = program.make()
    begun = copy.deepcopy(made.state_dict()) if "checkpoint(" in program.source and program.state else {}
    called, found = way(made), []
    for call in calls:
        found.append(_observe(program, made, called, call, masks))
        _put_back(made, begun)
    return found


def _put_back(made: Any, state: dict[str, Tensor]) -> None:
    """State as it was: how often a checkpointed block is run again, and counts, is nobody's promise."""
    with torch.no_grad():
        for name, value in _state(made).items():
            if (before := state.get(name.removeprefix("self."))) is not None and before.shape == value.shape:
                value.copy_(before)


def _observe(program: Program, made: Any, called: Callable, call: Call, masks: Masks) -> Observation:
    torch.manual_seed(100 + call.index)
    inputs = program.make_inputs(call.length, call.index)
    torch.manual_seed(200 + call.index)
    found = Observation()
    state = _state(made)
    named = {i.name: t for i, t in zip(program.inputs, inputs)} | state
    # A graph that raises within a region of autocast leaves it enabled, in torch 2.11.
    with masks.of_call(call.index), torch.autocast("cpu", enabled=False), MODES[call.mode]():
        modes = Modes.now()
        try:
            results = tree_leaves(called(*inputs))
            found.results = [_copy(r) for r in results]
            found.layouts = [_layout(r) for r in results]
        except Exception as error:  # noqa: BLE001
            found.error, found.message = _kind(error), str(error)
            results = []
        found.sharing = _sharing([*named.values(), *results])
        _observe_memory(found, program, inputs, made)
        if found.error is None and call.training:
            _observe_gradients(found, named, results, program.twice and call.index == 0)
            if "checkpoint(" not in program.source:  # how far a block is run again is nobody's promise
                _observe_memory(found, program, inputs, made)
        if (now := Modes.now()) != modes:
            found.left_in = now
            modes.restore()
    return found


def _observe_memory(found: Observation, program: Program, inputs: tuple[Any, ...], made: Any) -> None:
    """Arguments and state as they are now."""
    found.inputs = {i.name: (_copy(t), _layout(t)) for i, t in zip(program.inputs, inputs)}
    found.state = {name: (_copy(t), _layout(t)) for name, t in _state(made).items()}


def _observe_gradients(found: Observation, named: dict[str, Any], results: list[Any], twice: bool) -> None:
    """Of a random functional of all results, by every leaf and every result that is none. Or, twice, by the leaves
    alone and then of those gradients: a result that backward reads in one way may not be read in another."""
    results = [r.values() if isinstance(r, Tensor) and r.is_nested else r for r in results]
    wanted = {n: t for n, t in named.items() if isinstance(t, Tensor) and t.requires_grad}
    for i, r in enumerate(results):
        if not twice and isinstance(r, Tensor) and r.requires_grad and not any(r is t for t in wanted.values()):
            wanted[f"result {i}"] = r

    def gradients(tensors: list[Any], graph: bool) -> list[Tensor | None]:
        functional = [
            (t.double() * torch.randn(t.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)).sum()
            for i, t in enumerate(tensors)
            if isinstance(t, Tensor) and t.requires_grad and t.is_floating_point()
        ]
        if not functional:
            return [None] * len(wanted)
        return torch.autograd.grad(
            sum(functional), list(wanted.values()), allow_unused=True, create_graph=graph, retain_graph=graph
        )

    try:
        first = gradients(results, twice)
        found.gradients = {name: None if g is None else _copy(g) for name, g in zip(wanted, first)}
    except Exception as error:  # noqa: BLE001
        found.gradient_error, found.message = _kind(error), str(error)
        return
    if twice:
        try:
            second = gradients(first, False)
            found.second = {name: None if g is None else _copy(g) for name, g in zip(wanted, second)}
        except Exception as error:  # noqa: BLE001
            found.second_error, found.message = _kind(error), str(error)


def _kind(error: Exception) -> str:
    """What a caller would catch; Dynamo's own are those of what they wrap."""
    inner = getattr(error, "inner_exception", None)
    return (
        _kind(inner)
        if inner is not None
        else next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")
    )


def _state(made: Any) -> dict[str, Tensor]:
    if not isinstance(made, nn.Module):
        return {}
    return {f"self.{n}": t for n, t in (*made.named_parameters(), *made.named_buffers())}


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with torch.no_grad():
        if value.is_nested:
            return value.detach().values().clone()
        return value.detach().clone(memory_format=torch.contiguous_format)


def _layout(value: Any) -> Any:
    """What can be seen of a tensor beside its numbers; strides of sizes below two are nothing."""
    if not isinstance(value, Tensor) or value.is_nested:
        return type(value).__name__
    value.untyped_storage()  # raises for what torch.func has forgotten to unwrap
    strides = tuple(stride for stride, size in zip(value.stride(), value.shape) if size > 1)
    kind = type(value).__name__, value.dtype, tuple(value.shape), strides
    return *kind, value.requires_grad, value.is_leaf, value._is_view()


def _sharing(values: list[Any]) -> list[Any]:
    """For each of the tensors the first one that is the same object, the first of the same memory, and where in it."""
    objects: dict[int, int] = {}
    memories: dict[int, int] = {}
    found = []
    for i, value in enumerate(values):
        if not isinstance(value, Tensor) or value.is_nested or value.numel() == 0:
            found.append(None)
            continue
        memory = memories.setdefault(value.untyped_storage().data_ptr(), i)
        found.append((objects.setdefault(id(value), i), memory, value.storage_offset() if memory != i else 0))
    return found


WIDE = (torch.float32, torch.float64)
"""Of attention: in narrower types PyTorch's written-out one computes in float32, kernels multiply as they are."""


@contextlib.contextmanager
def prepared(then: str = "eager", linear: bool = False, attention: bool = False) -> Iterator[None]:
    """In here whatever a line can say becomes one, nothing is compiled by the system's compiler, and torch makes
    float64. A line without a kernel is a composition, and keeps a kernel's contract: its results are new and dense.
    `linear`: in inference linear layers are lines, too, as if each were faster so. `attention`: all calls of PyTorch's
    attention go to this package's. `then`: as for `trial`."""
    from onepass import call as calls
    from onepass import line as lines
    from onepass.rewrite import attention as attentions
    from onepass.rewrite import fuse as fusing
    from onepass.rewrite import heads as losses
    from onepass.rewrite import linear as layers
    from onepass.rewrite import linears, padding, prices

    reference = lines.Line.reference

    def composed(self, x, *operands, **options):
        results = reference(self, x, *operands, **options)
        if isinstance(results, tuple):
            return tuple(t.clone(memory_format=torch.contiguous_format) for t in results)
        return results.clone(memory_format=torch.contiguous_format)

    choose = attentions.choose
    prepare, front, differentiable = calls._prepare_on_cpu, calls.front, calls.differentiable

    def unless_autocast(function):
        """The C++ way asks for a compiler under autocast."""
        return lambda: None if torch.is_autocast_enabled("cpu") else function()

    def chosen(call: Any) -> str:
        if call.dtype not in WIDE:
            return ""
        return "onepass" if attention else choose(call)

    def ahead_of_time(text: str, *of: Any) -> bool:
        return "dropout" not in text and prepare(text, *of)

    def padded(node: Any, x: Any, weight: Any) -> bool:
        features = padding.value_of(weight).shape[0] if padding.is_tensor(x) and padding.is_tensor(weight) else 0
        return isinstance(features, int) and features % padding.STEP != 0

    def all_groups(graph: Any, *_: Any) -> list:
        return [] if fusing.changes_shapes(graph) else fusing.group_norms(graph)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(fusing, "groups_of", all_groups))
        stack.enter_context(
            _replaced(fusing, "gain_of", lambda chain, *_, **__: float(len(getattr(chain, "nodes", "1"))))
        )
        if linear:
            own = SimpleNamespace(**{**vars(prices), "has_own_product": lambda *_, **__: True})
            stack.enter_context(_replaced(layers, "prices", own))
            stack.enter_context(_replaced(layers, "_gains", lambda *_: True))
        stack.enter_context(_replaced(attentions, "choose", chosen))
        stack.enter_context(_replaced(losses, "LEAST_LOGITS", 0))
        stack.enter_context(_replaced(linears, "LONG_SUM", 0))
        stack.enter_context(_replaced(padding, "_gains", padded))
        stack.enter_context(_replaced(layers, "LARGE", 0))
        if then == "aot_eager":
            stack.enter_context(_replaced(compile_fx, "compile_fx", aot_eager))
        stack.enter_context(_replaced(lines.Line, "reference", composed))
        stack.enter_context(_replaced(calls, "_prepare_on_cpu", ahead_of_time))
        stack.enter_context(_replaced(calls, "front", unless_autocast(front)))
        stack.enter_context(_replaced(calls, "differentiable", unless_autocast(differentiable)))
        stack.enter_context(_replaced(guards, "profile_guard_manager", lambda *_: 0.0))  # it takes 60 ms a capture
        if BEFORE_2_12:  # where Dynamo does not see that a tensor of a module has another shape
            stack.enter_context(_replaced(dynamo, "skip_tensor_guards_with_matching_dict_tags", False))
        stack.enter_context(_default_dtype(torch.float64))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # others save their result, which checkpoints overwrite
        stack.enter_context(_environment("ONEPASS_CXX", "/nonexistent"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            lines._parse.cache_clear()  # they know by now that they have no kernel


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)  # AttributeError, rather than a hunt that replaces nothing
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
