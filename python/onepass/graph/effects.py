"""What nodes of a captured graph do beside giving a value: which memory they share, what they write, whether they draw.

Nothing is read off names. Each node is run once with the tensors without data that Dynamo captured, and PyTorch's
dispatcher says which operators it becomes; their schemas say what these write. A node that cannot be run so is taken to
write all memory that it is given.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

__all__ = [
    "Effects",
    "Memory",
    "bodies",
    "changes_shapes",
    "effects_of",
    "evaluated",
    "memory_of",
    "remove_unused",
    "tensors_of",
    "unwrapped",
]

CALLS = ("call_function", "call_method", "call_module")
UNKNOWN = -1
"""The memory of a tensor that does not say where it lies: it may be any."""
SHARES = "onepass_shares"
"""In a placeholder's meta: the memory of all inputs that may lie where it does."""
WITHIN = "onepass_within"
"""In the meta of a graph that a node runs: the autocasts that hold there."""
OWN_MODULES = ("torch", "_operator", "operator", "math", "builtins", "onepass")
"""Functions of these have no effects but those on tensors, generators and modes."""


@dataclass(frozen=True)
class Effects:
    """Of one node.

    Attributes:
        writes: memory of its arguments that it may change; UNKNOWN stands for any.
        draws: whether it may draw random numbers, or leave numbers undefined.
        known: whether it was observed: else it may do anything with what it is given, and see gradients, too.
        changes_shape: whether a tensor that was there before has another shape or other strides afterwards.
        by_strides: whether what it gives depends on where in memory the numbers of a tensor lie, as of `as_strided`.
        gives: memory of its arguments that its result has, too, where the value in the graph does not say so: torch
            2.11 has a copy there of a tensor that comes back as it was, from dropout that is off, say.
    """

    writes: frozenset[int] = frozenset()
    draws: bool = False
    known: bool = True
    changes_shape: bool = False
    by_strides: bool = False
    gives: frozenset[int] = frozenset()

    @property
    def none(self) -> bool:
        """Whether the node does nothing but give a value, the same for the same arguments."""
        return self.known and not self.writes and not self.draws


def effects_of(node: fx.Node) -> Effects:
    """Observed once for each target and arguments of a node."""
    call = (node.target, node.args, node.kwargs)
    remembered = _OBSERVED.get(node)
    if remembered is None or remembered[0] != call:
        remembered = _OBSERVED[node] = (call, _observe(node))
    return remembered[1]


_OBSERVED: weakref.WeakKeyDictionary[fx.Node, tuple[Any, Effects]] = weakref.WeakKeyDictionary()


def unwrapped(tensor: Tensor) -> Tensor:
    """Without levels of `torch.func`."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors with memory of their own that a value consists of: without subclasses and levels of `torch.func`."""
    for tensor in tree_leaves(value):
        if not isinstance(tensor, Tensor):
            continue
        tensor = unwrapped(tensor)
        if is_traceable_wrapper_subclass(tensor):
            yield from tensors_of([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
        else:
            yield tensor


def memory_of(value: Any) -> frozenset[int]:
    """The storages of a value's tensors."""
    return frozenset(map(_storage, tensors_of(value)))


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a sparse tensor, say
        return UNKNOWN


class Memory:
    """Which nodes of a graph may share memory."""

    def __init__(self, graph: fx.Graph) -> None:
        self._joined: dict[int, int] = {}
        for node in graph.nodes:
            self._join(node.meta.get(SHARES, frozenset()))
            if node.op in CALLS and not effects_of(node).known:  # its results may be views of what it was given
                self._join(_given(node) | memory_of(_value(node)))
            elif effects_of(node).gives:
                self._join(effects_of(node).gives | memory_of(_value(node)))

    def _join(self, storages: frozenset[int]) -> None:
        first, *others = (*(storages - {UNKNOWN}), UNKNOWN)
        for other in others[:-1]:
            self._joined[self._find(other)] = self._find(first)

    def _find(self, storage: int) -> int:
        while storage in self._joined and self._joined[storage] != storage:
            storage = self._joined[storage]
        return storage

    def of(self, node: fx.Node) -> frozenset[int]:
        """Names of the memory in which the node's value lies; values with a name in common may share memory."""
        return self.named(memory_of(_value(node)))

    def named(self, storages: frozenset[int]) -> frozenset[int]:
        """The same for storages."""
        return frozenset(map(self._find, storages))


def bodies(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a higher-order operator is given."""
    found = []
    for given in node.all_input_nodes:
        body = getattr(given.graph.owning_module, str(given.target), None) if given.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            body.meta[WITHIN] = _autocasts(node)
            found.append(body)
    return found


def changes_shapes(graph: fx.Graph) -> bool:
    """Whether a tensor's shape changes in it, or in a graph within it: what shape a tensor had when it was read is not
    known then, for Dynamo has changed the one tensor that stands for it."""
    return any(
        effects_of(node).changes_shape or any(changes_shapes(body.graph) for body in bodies(node))
        for node in graph.nodes
    )


def remove_unused(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Removes those of the nodes, and what only they need, that nobody uses and that do nothing but give a value."""
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node.graph is not graph or node._erased or node.users or node.op not in CALLS or not effects_of(node).none:
            continue
        queue += node.all_input_nodes
        graph.erase_node(node)


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _given(node: fx.Node) -> frozenset[int]:
    return frozenset().union(*(memory_of(_value(given)) for given in node.all_input_nodes))


def _observe(node: fx.Node) -> Effects:
    if node.op not in CALLS:
        return Effects()
    if isinstance(node.target, HigherOrderOperator):
        return _of_bodies(node)
    if not any(True for _ in tensors_of([_value(node), *map(_value, node.all_input_nodes)])):
        return Effects(known=False)  # it sets a mode, perhaps, which no tensor shows
    if _changes_shape(node):
        return Effects(_given(node), changes_shape=True)
    if node.op != "call_module" and _is_ours(node):
        call = _described(node)
        if call in _PURE:
            return Effects()
        try:
            observed = _run(node)
        except Exception:  # whatever PyTorch's functions raise for tensors without data
            return _anything(node)
        if call is not None and observed == Effects():
            _remember(call)
        return observed
    return _anything(node)


def _changes_shape(node: fx.Node) -> bool:
    """Of a method such as `squeeze_`, whose operator says so: it is not run, which torch 2.15 ends with a crash where
    sizes change from call to call."""
    if node.op != "call_method" or not node.target.endswith("_") or node.target.endswith("__"):
        return False
    packet = getattr(torch.ops.aten, node.target, None)
    overloads = [] if packet is None else [getattr(packet, name) for name in packet.overloads()]
    return any(torch.Tag.inplace_view in overload.tags for overload in overloads)


_PURE: set[tuple[Any, str]] = set()
"""Calls that did nothing but give a value: a model has the same ones layer by layer."""
MOST_CALLS = 10000


def _remember(call: tuple[Any, str]) -> None:
    if len(_PURE) >= MOST_CALLS:
        _PURE.clear()
    _PURE.add(call)


def _described(node: fx.Node) -> tuple[Any, str] | None:
    """The function, and its arguments as far as what it does can depend on them; None where sizes change."""

    def describe(given: fx.Node) -> object:
        tensors = list(tree_leaves(_value(given)))
        if not all(isinstance(t, FakeTensor) for t in tensors):
            raise LookupError
        if any(isinstance(n, torch.SymInt) for t in tensors for n in (*t.shape, *t.stride())):
            raise LookupError
        return [(t.dtype, t.device, t.shape, t.stride(), t.requires_grad, t.layout) for t in tensors]

    try:
        return node.target, repr(fx.node.map_arg((node.args, node.kwargs), describe))
    except LookupError:
        return None


def _anything(node: fx.Node) -> Effects:
    """Of a node that cannot be looked into. Within levels of `torch.func`, whose tensors cannot be run apart, what
    nobody has written until the graph's end this node has not."""
    writes = _given(node)
    values = [_value(node), *(_value(given) for given in node.all_input_nodes)]
    if any(isinstance(t, Tensor) and is_functorch_wrapped_tensor(t) for t in tree_leaves(values)):
        written = {_storage(t) for t in tensors_of(values) if t.is_inference() or t._version}
        return Effects(writes & written, draws=True, known=False)
    return Effects(writes, draws=True, known=False)


def _of_bodies(node: fx.Node) -> Effects:
    """Of an operator that runs graphs: nothing, where these write nothing that they did not make."""
    graphs = [body.graph for body in bodies(node)]
    if node.target.__name__ == "register_hook" or not all(map(_writes_its_own, graphs)):
        return _anything(node)
    calls = [effects_of(inner) for graph in graphs for inner in graph.nodes if inner.op in CALLS]
    return Effects(draws=any(inner.draws for inner in calls), known=all(inner.known for inner in calls))


def _writes_its_own(graph: fx.Graph) -> bool:
    taken = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    memory = frozenset().union(*(memory_of(_value(node)) for node in taken))
    return not any(effects_of(node).writes & (memory | {UNKNOWN}) for node in graph.nodes)


def _is_ours(node: fx.Node) -> bool:
    if node.op == "call_method" or isinstance(node.target, (OpOverload, OpOverloadPacket)):
        return True
    module = getattr(node.target, "__module__", None) or ""  # methods of C++ have none
    return module.partition(".")[0] in OWN_MODULES or not module and "torch" in repr(node.target)


@dataclass
class _Watch(TorchDispatchMode):
    """Remembers what the operators that are run write, and whether they draw."""

    writes: set[int] = field(default_factory=set)
    draws: bool = False
    changed: set[int] = field(default_factory=set)  # memory of tensors whose shape changes
    by_strides: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written or argument.name in STATISTICS:
                value = kwargs.get(argument.name) if argument.kwarg_only or i >= len(args) else args[i]
                self.writes |= memory_of(value)
        name = func._schema.name
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags or "empty" in name
        if torch.Tag.inplace_view in func.tags or name in ("aten::set_", "aten::resize_"):
            self.changed |= memory_of(args[0])
        self.by_strides |= "as_strided" in name
        return func(*args, **kwargs)


STATISTICS = ("running_mean", "running_var")
"""Arguments of `native_batch_norm` and its like, which write them without their schemas' saying so."""


def _run(node: fx.Node) -> Effects:
    watch = _Watch()
    value = evaluated(node, torch.no_grad(), watch)
    given = _given(node) | {UNKNOWN}
    gives = memory_of(value) & _given(node) - memory_of(_value(node))
    return Effects(
        frozenset(watch.writes) & given, watch.draws, True, bool(watch.changed & given), watch.by_strides, gives
    )


def evaluated(
    node: fx.Node, *contexts: contextlib.AbstractContextManager, values: Mapping[fx.Node, Any] | None = None
) -> Any:
    """What a node gives: it is run with the tensors without data of the nodes that it takes, within the graph's
    autocasts around it and these contexts.

    values: in the place of what some of these nodes gave.
    """
    mode = _fake_mode(node)
    with contextlib.ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
            if mode.shape_env is not None:  # sizes were decided when the graph was captured
                stack.enter_context(mode.shape_env.suppress_guards())
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), functools.partial(_argument, values=values or {}))
        for given, named in _autocasts(node):
            stack.enter_context(torch.autocast(*given, **named))
        for context in contexts:
            stack.enter_context(context)
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        return node.target(*args, **kwargs)


def _autocasts(node: fx.Node) -> tuple[tuple[tuple, Mapping[str, Any]], ...]:
    """Arguments of those that hold at a node, the outermost first: of what runs its graph, and those that the graph
    enters before it and leaves behind it."""
    owner = node.graph.owning_module
    around = () if owner is None else owner.meta.get(WITHIN, ())
    for entered in node.graph.find_nodes(op="call_function", target=_enter_autocast):
        left = [user for user in entered.users if user.target is _exit_autocast]
        if entered < node and not any(exit < node for exit in left):
            around = (*around, (entered.args, entered.kwargs))
    return around


def detached(value: Tensor) -> Tensor:
    """Another tensor of the same memory and without a history, which autograd may refuse to be used: that of a view
    whose memory has been overwritten."""
    return value.detach().requires_grad_(value.requires_grad)


def _argument(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """What it gave, as another tensor of the same memory: a method that changes a shape changes that of this one."""
    if "example_value" not in node.meta:
        raise LookupError(f"{node.name} has no value")
    given = values.get(node, node.meta["example_value"])

    def another(value):
        if isinstance(value, Tensor):
            if is_functorch_wrapped_tensor(value):
                raise LookupError(f"{node.name} stands within torch.func")
            return detached(value)
        if isinstance(value, (list, tuple)):
            made = [another(v) for v in value]
            return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
        return value

    return another(given)


def _fake_mode(node: fx.Node) -> FakeTensorMode | None:
    """That of the graph's tensors."""
    for other in (*node.all_input_nodes, node, *node.graph.nodes):
        for tensor in tensors_of(_value(other)):
            if isinstance(tensor, FakeTensor):
                return tensor.fake_mode
    return None
