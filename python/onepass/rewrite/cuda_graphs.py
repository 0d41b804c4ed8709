"""A graph with lines in it as CUDA graphs, one forward and one backward: `fuse(model, mode="reduce-overhead")`.

PyTorch's operators and our lines are run as they are at the first call, recorded at the second, and replayed from then
on, by what records Inductor's kernels for torch.compile (`torch._inductor.cudagraph_trees`). PyTorch's own backend for
that, "cudagraphs", takes parameters for inputs that may lie elsewhere at each call, and copies them.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, fx

from onepass.graph.effects import tensors_of

__all__ = ["recorded", "say_skipped"]


def say_skipped(why: str) -> None:
    """Warns as torch.compile does where a graph is run as it is."""
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    log_cudagraph_skip_and_bump_counter(f"skipping cudagraphs due to {why}")


def recorded(gm: fx.GraphModule, inputs: Sequence[object]) -> Callable:
    """The graph, traced forward and backward, to be called.

    Where it cannot be recorded (an operator on the CPU, a size that depends on data) it is run as it is, and a warning
    of PyTorch's says why, as with torch.compile.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex

    one_way = functools.partial(_recorded, BoxedDeviceIndex(None))
    call = aot_autograd(
        fw_compiler=one_way,
        bw_compiler=functools.partial(one_way, is_backward=True),
        inference_compiler=functools.partial(one_way, is_inference=True),
        keep_inference_input_mutations=True,
    )(gm, inputs)

    known: list[weakref.ref[Tensor]] = []  # parameters of the last call

    def run(*given: object) -> object:
        _GRADIENTS.copy_to_own_memory()
        if torch.is_grad_enabled():
            parameters = [t for t in given if isinstance(t, Tensor) and t.requires_grad and t.is_leaf]
            if len(parameters) != len(known) or any(ref() is not t for ref, t in zip(known, parameters)):
                known[:] = _GRADIENTS.remember_parameters(parameters)
        return call(*given)

    return run


class _Gradients:
    """Gradients that replays have made. They lie in memory of the graphs, which the next forward overwrites: where a
    parameter still has one, as where a step is several calls, it is copied before."""

    def __init__(self) -> None:
        self.parameters: dict[int, weakref.ref[Tensor]] = {}
        self.made: set[int] = set()  # where the results of backward lie
        self.lock = threading.RLock()  # a parameter may go while another is looked at

    def remember_parameters(self, parameters: Iterable[Tensor]) -> list[weakref.ref[Tensor]]:
        """Those that a graph is given, which may have such gradients."""
        with self.lock:
            made = [weakref.ref(p, functools.partial(self._forget, id(p))) for p in parameters]
            self.parameters.update((id(ref()), ref) for ref in made)
        return made

    def _forget(self, key: int, ref: weakref.ref[Tensor]) -> None:
        with self.lock:
            if self.parameters.get(key) is ref:
                del self.parameters[key]

    def remember_results(self, results: Iterable[object]) -> None:
        """Of a backward pass."""
        with self.lock:
            self.made.update(_addresses(results))

    def copy_to_own_memory(self) -> None:
        """What parameters still have of them."""
        with self.lock:
            if not self.made:
                return
            made, self.made = self.made, set()
            # A copy that is made in inference mode could not be added to.
            with torch.inference_mode(False), torch.no_grad():
                for ref in list(self.parameters.values()):
                    parameter = ref()
                    if parameter is not None and parameter.grad is not None and made & _addresses([parameter.grad]):
                        parameter.grad = parameter.grad.clone()


def _addresses(values: Iterable[object]) -> set[int]:
    """Where dense tensors begin, those within DTensors, too."""
    parts = (part for value in values for part in ((value,) if type(value) is Tensor else tensors_of(value)))
    return {part.data_ptr() for part in parts if part.layout is torch.strided}


_GRADIENTS = _Gradients()  # of all models: whichever is called first begins a step


def _recorded(
    device, graph: fx.GraphModule, inputs: Sequence[object], is_backward: bool = False, is_inference: bool = False
) -> Callable:
    """One direction. device: that of forward, once that is recorded; backward is recorded with it, or not at all."""
    from torch._dynamo.backends.cudagraphs import find_input_mutations, get_stack_traces
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor import cudagraph_utils as utils
    from torch._inductor.compile_fx import cudagraphify, get_static_input_idxs
    from torch._inductor.utils import count_tangents

    call = boxed_nop(graph, inputs)
    if is_backward and device.value is None:
        return call
    devices = _devices(graph)
    why_not = _why_not(graph, devices)
    if why_not is not None:
        say_skipped(why_not)
        return _as_it_is(call, device.value) if is_backward else call
    if not is_backward:
        device.set(next(iter(devices)).index)
    run = cudagraphify(
        call,
        range(count_tangents(graph)) if is_backward else get_static_input_idxs(0),
        device_index=device.value,
        stack_traces=get_stack_traces(graph),
        is_backward=is_backward,
        is_inference=is_inference,
        placeholders=utils.get_placeholder_info(graph.graph),
        mutated_input_idxs=tuple(find_input_mutations(graph.graph)),
    )
    return _boxed(_and_notes_results(run) if is_backward else run)


def _boxed(call: Callable) -> Callable:
    """One that takes a list of what it is given, and empties it."""
    call._boxed_call = True
    return call


def _and_notes_results(call: Callable) -> Callable:
    def run(inputs: list[object]) -> Sequence[object]:
        results = call(inputs)
        _GRADIENTS.remember_results(results)
        return results

    return run


def _as_it_is(call: Callable, device: int) -> Callable:
    """A backward that is not recorded, behind a forward that is: the next forward begins a step."""

    def run(inputs: list[object]) -> object:
        from torch._inductor.cudagraph_trees import get_manager

        get_manager(device, create_if_none_exists=False).set_to_running_backward()
        return call(inputs)

    return _boxed(run)


def _devices(graph: fx.GraphModule) -> dict[torch.device, fx.Node]:
    """Those where tensors are, each with one; numbers that kernels are launched with are nowhere."""
    tensors = (node for node in graph.graph.nodes if isinstance(node.meta.get("val"), Tensor))
    return {node.meta["val"].device: node for node in tensors if not _is_number(node)}


def _is_number(node: fx.Node) -> bool:
    """Whether it is a number on the CPU that is the same at each call, and that kernels are launched with."""
    value, tags = node.meta.get("val"), getattr(node.target, "tags", ())
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.dim() != 0:
        return False
    if node.op == "placeholder" or torch.Tag.nondeterministic_seeded in tags:
        return False
    return all(_is_number(each) for each in node.all_input_nodes) and all(_takes_numbers(user) for user in node.users)


def _takes_numbers(user: fx.Node) -> bool:
    """As an argument of a kernel. torch.where copies them to the device."""
    value, target, aten = user.meta.get("val"), user.target, torch.ops.aten
    if isinstance(value, Tensor) and value.device.type == "cpu" or target is aten.fill.Tensor:
        return True
    return torch.Tag.pointwise in getattr(target, "tags", ()) and target is not aten.where.self


def _why_not(graph: fx.GraphModule, devices: dict[torch.device, fx.Node]) -> str | None:
    """Why a graph cannot be recorded, or None."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    elsewhere = next((device for device in devices if device.type != "cuda"), None)
    if elsewhere is not None:
        return f"a tensor on the {elsewhere.type.upper()} ({devices[elsewhere].name})"
    if len(devices) != 1:
        return f"{len(devices)} devices"
    node = get_first_incompatible_cudagraph_node(graph)
    return None if node is None else f"incompatible op ({node.name})"
