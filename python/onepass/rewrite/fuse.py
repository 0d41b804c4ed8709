"""`onepass.fuse`: a model whose chains of operators are lines."""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.utils.hooks import RemovableHandle

from onepass.graph.effects import changes_shapes, remove_unused
from onepass.graph.operations import is_tensor, leave_apart, value_of
from onepass.pricing.prices import Price
from onepass.pricing.profile import Profile, profile_of
from onepass.rewrite import prices
from onepass.rewrite.attention import (
    drop_empty_joins,
    drop_second_copies,
    fold_scales,
    put_own_attention,
    take_before_copies,
    with_products,
)
from onepass.rewrite.checkpoints import checkpointed_blocks, differing_blocks, draw_again
from onepass.rewrite.constants import fill_constants, hold_constants
from onepass.rewrite.cuda_graphs import recorded, say_skipped
from onepass.rewrite.encoder import open_encoder_layers
from onepass.rewrite.find.chains import Chain, Order, apart, chains, with_less_saved
from onepass.rewrite.groups import Groups, group_norms, put_groups
from onepass.rewrite.heads import Head, heads, put_head, without_logits
from onepass.rewrite.inputs import by_memory, copied
from onepass.rewrite.linear import begins_in_cache, name_linear, with_less_held, with_linear_layers
from onepass.rewrite.linears import join_linears
from onepass.rewrite.masks import name_masks
from onepass.rewrite.modes import enters, leaves_as_found
from onepass.rewrite.padding import pad_features
from onepass.rewrite.report import Fused, Report
from onepass.rewrite.rewriter import CASTS, put_lines, rejoin_biases, remove_casts, separate_biases, separate_casts
from onepass.rewrite.routing import gather_back
from onepass.rewrite.sharded import between_hooks, is_sharded
from onepass.rewrite.shared_masks import share_masks
from onepass.rewrite.stacks import join_pieces, turn_pieces
from onepass.word import about

__all__ = ["Rewriter", "fuse", "rewrite", "unfuse"]

THEN = ("eager", "inductor")
DEVICES = ("cpu", "cuda")


def gain_of(chain: Chain, profile: Profile, training: bool, then: str) -> float:
    """Seconds that a line is predicted to save, forward and backward; none where it is not worth a change."""
    multiplies = prices.has_own_product(chain, profile, training)
    if is_plain(chain) or then == "inductor" and not (multiplies or is_for_us(chain)):
        return 0.0
    before, after = prices.decision(chain, profile, training)
    return before.seconds - after.seconds if prices.is_worth_it(before, after) else 0.0


def gain_behind_products(chain: Chain, profile: Profile, training: bool, then: str) -> float:
    """The same of a chain that may yet be joined with the linear layer before it, and then begins in a core's cache."""
    gained = gain_of(chain, profile=profile, training=training, then=then)
    if is_plain(chain) or not begins_in_cache(chain, profile, training):
        return gained
    before, after = prices.decision(chain, profile, training, goes_on=True)
    return max(gained, before.seconds - after.seconds) if prices.is_worth_it(before, after) else gained


def is_joined(chain: Chain) -> bool:
    """Whether a norm and the linear layer behind it are one line, which `with_linear_layers` has decided."""
    return chain.has("row") and chain.has_linear


def is_plain(chain: Chain) -> bool:
    """Whether it is one sum or one product, of which there is nothing to fuse."""
    return len(chain.nodes) == 1 and all({"adds", "scales"} & {*about(word).properties} for word in chain.words)


def is_for_us(chain: Chain) -> bool:
    """Whether a line is faster than what Inductor makes of the same: it writes pure element-wise chains as well."""
    return chain.has("row", "dropout")


def lines_of(graph: fx.Graph, profile: Profile, training: bool, then: str = "eager", nested=False) -> list[Chain]:
    """The lines that a graph is worth; `nested`: that of a checkpointed block, which holds nothing. Prepares the graph:
    what PyTorch does in one kernel, a linear layer with its bias and its casts, is several nodes afterwards."""
    if changes_shapes(graph):
        return []
    leave_apart(graph)
    remove_casts(graph)
    open_encoder_layers(graph)
    join_pieces(graph)
    turn_pieces(graph)
    name_masks(graph)
    share_masks(graph)
    fold_scales(graph)
    drop_empty_joins(graph)
    separate_casts(graph)
    if training:
        separate_biases(graph)
    else:
        name_linear(graph)
    how = {"profile": profile, "training": training, "then": then}
    found = chains(graph, functools.partial(gain_behind_products, **how))
    order = Order(graph)
    if training:
        longer = [(with_less_saved(chain), chain) for chain in found]
        found = [more if more is chain or order.place(more) else chain for more, chain in longer]
    found = [longer if order.place(longer := with_products(chain)) else chain for chain in found]
    found = with_linear_layers(graph, found, device_of(graph), profile, training)
    found = apart(chain for chain in found if is_joined(chain) or gain_of(chain, **how) > 0)
    return with_less_held(graph, found) if training and then == "eager" and not nested else found


def groups_of(graph: fx.Graph, profile: Profile, training: bool) -> list[Groups]:
    """The group normalisations that `put_groups` is to take: lines are predicted to be faster."""
    if changes_shapes(graph):
        return []
    totals = lambda groups: (sum(both, Price()) for both in prices.of_groups(groups, profile, training))  # noqa: E731
    return [groups for groups in group_norms(graph) if prices.is_worth_it(*totals(groups))]


def losses_of(graph: fx.Graph, training: bool, then: str = "eager", nested: bool = False) -> Iterator[Head]:
    """The losses that `put_head` is to take, and their heads. Inductor has kernels of its own for losses of logits, and
    a checkpointed block that it compiles would make a head's gradients in both of its forwards."""
    if not changes_shapes(graph):
        inductors = then == "inductor"
        found = heads(graph, training)
        yield from (head for head in found if not inductors or head.layer is not None and not (nested and training))


def device_of(graph: fx.Graph) -> torch.device:
    """Of the first tensor."""
    return next((value_of(node).device for node in graph.nodes if is_tensor(node)), torch.device("cpu"))


def is_on_cuda(graph: fx.Graph) -> bool:
    """Whether a tensor is."""
    return any(is_tensor(node) and value_of(node).is_cuda for node in graph.nodes)


def rewrite(
    gm: fx.GraphModule, *, then: str = "eager", profile: Profile | None = None, nested: bool = False
) -> list[Fused]:
    """Puts lines into a graph that Dynamo has captured, and into its checkpointed blocks; says what was done.

    nested: whether the graph is such a block, which runs twice.
    """
    graph, done = gm.graph, []
    for block in checkpointed_blocks(graph):
        done += rewrite(block, then=then, profile=profile, nested=True)
    device = device_of(graph)
    if device.type not in DEVICES:
        return done
    profile = profile or profile_of(device)
    training = torch.is_grad_enabled() and any(is_tensor(n) and value_of(n).requires_grad for n in graph.nodes)
    fill_constants(graph)
    if training:
        gather_back(graph)
    if not changes_shapes(graph):  # accelerate casts what a model returns, whether that is used or not
        remove_unused(graph, [node for node in graph.nodes if node.op == "call_method" and node.target in CASTS])
    for head in losses_of(graph, training, then, nested):
        said = Fused.of_head(head, profile, training, nested)
        done += [said] if put_head(graph, head) is not None else []
    instead: dict[fx.Node, fx.Node] = {}
    for groups in groups_of(graph, profile, training):
        said = Fused.of_groups(groups, profile, training)
        done += [said] if put_groups(graph, groups, instead) is not None else []
    found = lines_of(graph, profile, training, then, nested)
    done += [Fused.of(chain, profile, training) for chain in found]
    put_lines(graph, found)
    rejoin_biases(graph)
    take_before_copies(graph)
    drop_second_copies(graph)
    done += [Fused.of_call(node) for node in put_own_attention(graph)]
    if training and then == "eager":
        join_linears(graph, nested)
    if then == "eager":
        pad_features(graph)
    graph.lint()
    gm.recompile()
    return done


class Rewriter:
    """A backend of torch.compile that runs a graph with lines in it; `report` says what they are.

    Args:
        then: what runs the rest: "eager" or "inductor".
        dry_run: only looks, and runs the graph as it was.
        device: the profile by which gains are predicted, as for :func:`onepass.explain`; that of the graph's device if
            None.
        mode: as of :func:`fuse`.
    """

    def __init__(self, then: str = "eager", dry_run: bool = False, device=None, mode: str | None = None) -> None:
        if then not in THEN:
            raise ValueError(f"fuse(): expected then to be one of {', '.join(THEN)}, but got {then!r}")
        if mode is not None:
            check_mode(mode, then)
        self.mode = mode
        self.then, self.dry_run = then, dry_run
        self.profile = None if device is None else profile_of(device)
        self.report = Report()

    def __call__(self, gm: fx.GraphModule, example_inputs) -> Callable:
        """What torch.compile calls with each graph. One with nodes that take what stands behind them stays as it is:
        torch 2.11 captures checkpointed blocks within others so, where sizes change."""
        try:
            gm.graph.lint()
        except RuntimeError:
            return gm.forward

        def prepare(gm: fx.GraphModule, captured: bool) -> Callable:
            rewritten = copied(gm) if self.dry_run else gm
            self.report.add(len(gm.graph.nodes), rewrite(rewritten, then=self.then, profile=self.profile))
            if self.then == "inductor" and captured and not self.dry_run:
                from torch._inductor import list_mode_options
                from torch._inductor.compile_fx import compile_fx

                patches = list_mode_options(self.mode) if self.mode else None
                return compile_fx(gm, example_inputs, config_patches=patches)
            if self.mode == "reduce-overhead" and not self.dry_run and is_on_cuda(gm.graph):
                if captured:
                    return recorded(gm, example_inputs)
                say_skipped("inputs that lie in each other's memory otherwise than those of the first call")
            if not self.dry_run:
                hold_constants(gm)
            run_as_is(gm)
            return leaves_as_found(gm.forward) if enters(gm.graph) else gm.forward

        return by_memory(gm, example_inputs, prepare)


def check_mode(mode: str, then: str) -> None:
    """Raises ValueError for a mode that what runs the rest has not."""
    from torch._inductor import list_mode_options

    modes = sorted(list_mode_options()) if then == "inductor" else ["default", "reduce-overhead"]
    if mode not in modes:
        raise ValueError(f"fuse(): expected mode to be one of {', '.join(modes)} where then={then!r}, but got {mode!r}")


def run_as_is(gm: fx.GraphModule, nested: bool = False) -> None:
    """Prepares a graph, or a checkpointed block of one, to be run by PyTorch's operators as they are."""
    left = differing_blocks(gm.graph)
    for block in checkpointed_blocks(gm.graph):
        run_as_is(block, nested=True)
    draw_again(gm.graph, left, nested)
    gm.recompile()


def backend(gm: fx.GraphModule, example_inputs, *, options: dict[str, Any] | None = None, mode=None) -> Callable:
    """For `torch.compile(model, backend="onepass")`; options are Rewriter's arguments, mode is one, too."""
    known = list(inspect.signature(Rewriter).parameters)
    if unknown := sorted({*(options or {})} - {*known}):
        raise TypeError(f"backend 'onepass': no option is called {unknown[0]!r}; there are {', '.join(known)}")
    return Rewriter(**{"mode": mode, **(options or {})})(gm, example_inputs)


Model = TypeVar("Model", bound=Callable)


def fuse(
    model: Model,
    *,
    then: str = "eager",
    dry_run: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    skip_logits: bool = False,
    device: str | Path | Profile | None = None,
) -> Model:
    """Puts lines into a model in the place of the chains of operators that they are the same as.

    The model is captured with Dynamo when it is called, once for each kind of input, as torch.compile does it. In what
    was captured chains such as bias, dropout, residual sum and norm, group normalisation and its activation,
    written-out activations, attention with its softmax written out and gated products become lines where they are
    predicted to be faster. A head with its loss, whose logits nobody else sees, becomes
    `functional.linear_cross_entropy`, and a loss of other logits `functional.cross_entropy`; all else stays as it is.
    Results, gradients, strides and what is overwritten stay what they were: a chain that somebody could tell from its
    line stays a chain. Three things differ, as they do in lines: a row of `softmax` that is -inf throughout gives
    zeros, not NaN; dropout draws other masks from a seed than PyTorch does, and a NaN that it drops is gone; and a line
    saves what it takes, so that an input which the caller overwrites between forward and backward raises PyTorch's
    error even where PyTorch's operators had saved another tensor.

    Args:
        model: a module, which is changed in place: its parameters, buffers, hooks and state dict stay what they are,
            and hooks that come later run, too, but those of a module that takes another's place after the first call
            only if they are added then. Or a function. A module is fused as it is called, `model(x)`: its
            `model.forward(x)` is what it was. Copies of a fused module (deepcopy, pickle) are not fused.
        then: what runs the rest, and what is predicted with: "eager" as it is, "inductor" by torch.compile's compiler,
            to which element-wise chains are then left.
        dry_run: only looks, and runs the model as it is.
        dynamic: as torch.compile's.
        mode: as torch.compile's. "reduce-overhead" records a step as CUDA graphs, lines and what runs the rest, so that
            a model of short kernels does not wait for the host: the third call of each kind of inputs is the first
            that is fast. A result is overwritten by the next call then; one that is kept is to be cloned. Others are of
            the compiler that `then="inductor"` names.
        skip_logits: while gradients are recorded, a result with a `loss` (transformers' `ModelOutput`) comes without
            its `logits`, which are never made then, and without the cache of keys and values that nobody asked for. A
            model that returns them has them made, whoever reads them.
        device: by what times chains are chosen, as in :func:`explain`: "h200", "h100", "a100", "cpu", or the file that
            `onepass calibrate` wrote for this machine; those of the tensors' device if None.

    Returns:
        The module itself, or the function fused. :func:`report` says what was found; :func:`unfuse` takes it back, and
        gives a module that was compiled with `model.compile()` that again.

    Raises:
        TypeError: for what cannot be called.
        ValueError: for another `then`, a mode or a device that there is not.
    """
    if not callable(model):
        raise TypeError(f"fuse(): argument 'model' must be callable, not {type(model).__name__}")
    rewriter = Rewriter(then, dry_run, device, mode)
    if isinstance(model, nn.Module):
        unfuse(model)
        _FUSED[model] = rewriter, model._compiled_call_impl
        model._compiled_call_impl = _Captured(model, rewriter, dynamic, skip_logits)
        return model
    fused = torch.compile(called(model, skip_logits), backend=rewriter, dynamic=dynamic)
    functools.update_wrapper(fused, model, updated=())
    fused.__dict__.update({REWRITER: rewriter, ORIGINAL: model})
    return fused


class _Captured:
    """What calls a fused module. Dynamo does not look whether a module without hooks has got some since (its
    skip_nnmodule_hook_guards): there is a capture for each set of modules that have hooks."""

    def __init__(self, model: nn.Module, rewriter: Rewriter, dynamic: bool | None, skip_logits: bool) -> None:
        self.compile = lambda f: torch.compile(called(f, skip_logits), backend=rewriter, dynamic=dynamic)
        self.modules, self.call = model.modules, model
        self.captures: dict[tuple, Callable] = {}
        self.look()

    def look(self) -> None:
        """Takes the capture of the hooks that there are now."""
        self.handles = RemovableHandle.next_id
        found = [
            (i, name, hooks) for i, m in enumerate(self.modules()) for name in HOOKS if (hooks := m.__dict__.get(name))
        ]
        self.hooks, key = [hooks for *_, hooks in found], tuple((i, name) for i, name, _ in found)
        if key not in self.captures:
            sharded = is_sharded(self.call)
            self.captures[key] = between_hooks(self.call, self.compile) if sharded else self.compile(self.call)
        self.captured = self.captures[key]

    def __call__(self, *inputs, **options):
        if not torch.compiler.is_dynamo_compiling():
            if RemovableHandle.next_id != self.handles or not all(self.hooks):
                self.look()
        return self.captured(*inputs, **options)


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def called(model: Callable, skip_logits: bool = False) -> Callable:
    """The model within a function. Dynamo passes over the frames of PyTorch's own modules, keeps what it has captured
    by a function's code, a few for each, and by its name (torch 2.10) which sizes have changed from call to call: so
    this one has code and a name of its own."""
    inner = model._call_impl if isinstance(model, nn.Module) else model

    def call(*inputs, **options):
        result = inner(*inputs, **options)
        return without_logits(result, inputs, options) if skip_logits else result

    call.__code__ = call.__code__.replace(co_name=f"call_{next(_calls)}")
    return call


_calls = itertools.count()

_FUSED: weakref.WeakKeyDictionary[nn.Module, tuple[Rewriter, Callable | None]] = weakref.WeakKeyDictionary()
"""Fused modules, and what `module.compile()` had put in the same place. Copies are none."""
REWRITER, ORIGINAL = "_onepass_rewriter", "_onepass_original"  # of functions


def unfuse(model: Model) -> Model:
    """The model as it was before :func:`fuse`."""
    if isinstance(model, nn.Module):
        if model in _FUSED:
            _, model._compiled_call_impl = _FUSED.pop(model)
        return model
    return getattr(model, ORIGINAL, model)


def report(model: Callable) -> Report:
    """What :func:`fuse` has found in a model since; it is empty before the first call.

    Raises:
        ValueError: for a model that is not fused, a copy of one that is, for example.
    """
    if isinstance(model, nn.Module):
        rewriter, _ = _FUSED.get(model, (None, None))
    else:
        rewriter = getattr(model, "__dict__", {}).get(REWRITER)
    if rewriter is None:
        raise ValueError(
            f"report(): expected a model that fuse() returned, but got a {type(model).__name__} that is not fused (a "
            "copy of a fused model is not: call fuse() on it)"
        )
    return rewriter.report
