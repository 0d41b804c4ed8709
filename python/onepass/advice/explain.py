"""`onepass.explain`: should this be fused, what would it save, and what won't help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from onepass.advice.report import SUMS, Advice, Explanation, Operator
from onepass.graph.operations import MOVING, is_tensor, operation, results_of, sizes, value_of
from onepass.line import _parse
from onepass.pricing.bodies import Part, checkpointed, parts
from onepass.pricing.nodes import given_to
from onepass.pricing.prices import Price, of_node, size_of
from onepass.pricing.profile import Profile, profile_of
from onepass.pricing.saved import saved_by
from onepass.rewrite import prices
from onepass.rewrite.find.chains import Chain
from onepass.rewrite.fuse import called, groups_of, lines_of, losses_of
from onepass.rewrite.groups import Groups, put_groups
from onepass.rewrite.heads import Head, put_head
from onepass.word import about

__all__ = ["explain"]


def explain(
    model: Callable, *inputs: Any, device: torch.device | str | Profile | None = None, **options: Any
) -> Explanation:
    """Says what a model's operators cost on a device, which chains of them one line could do, and what it would save.

    The model is captured by Dynamo and is not run: no kernel is launched for it, and the device that is asked about
    need not be here.

    Args:
        model: a module or a function. Its parameters may be on the device "meta".
        inputs, options: what it is called with.
        device: "h200", "h100", "a100", "cpu", a file that `onepass calibrate` wrote, or a torch device; the present one
            if None.

    Returns:
        The explanation: `print` shows it as tables, `to_json` gives all of it, `plot` draws a roofline, and `measure`
        runs the lines, and what they stand for, where such a device is.

    Raises:
        TypeError: for what cannot be called.
        ValueError: for a device of which there is no profile.
    """
    if not callable(model):
        raise TypeError(f"explain(): argument 'model' must be callable, not {type(model).__name__}")
    profile = profile_of(device)
    explained = Explanation(profile)

    def look(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable:
        _explain_graph(gm, profile, explained)
        return _without_running(gm.graph)

    with torch._dynamo.config.patch(allow_rnn=True):  # which has a price; a break of the graph has none
        torch.compile(called(model), backend=look, dynamic=False)(*inputs, **options)
    return explained


def _without_running(graph: fx.Graph) -> Callable:
    """Zeros in the place of all results."""
    results = graph.output_node().args[0]

    def zeros(*_) -> tuple:
        return fx.node.map_arg(results, lambda node: _zeros(value_of(node)))

    return zeros


def _zeros(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.zeros(sizes(value), dtype=value.dtype, device=value.device)


def _explain_graph(gm: fx.GraphModule, profile: Profile, explained: Explanation) -> None:
    training = torch.is_grad_enabled() and any(
        is_tensor(node) and value_of(node).requires_grad for node in gm.graph.nodes
    )
    explained.training |= training
    graphs = {gm.graph: False, **{block.graph: training for block in checkpointed(gm)}}
    calls = set()
    for graph, again in graphs.items():
        for head in losses_of(graph, training):
            of_head = [_operator(p, head.line, profile) for p in parts(gm, profile, training) if p.node in head.nodes]
            advice = _advice_of_head(head, profile, training, again)
            if (call := put_head(graph, head)) is not None:
                calls.add(call)
                explained.operators += of_head
                explained.lines.append(advice)
        instead: dict[fx.Node, fx.Node] = {}
        for groups in groups_of(graph, profile, training):
            its = [_operator(p, groups.line, profile) for p in parts(gm, profile, training) if p.node in groups.nodes]
            advice = _advice_of_groups(groups, profile, training, again)
            if (call := put_groups(graph, groups, instead)) is not None:
                calls.add(call)
                explained.operators += its
                explained.lines.append(advice)
    found = {
        chain: again for graph, again in graphs.items() for chain in lines_of(graph, profile, training, nested=again)
    }
    by_node = {node: chain.line for chain in found for node in chain.nodes - prices.left_to_pytorch(chain)}
    for part in parts(gm, profile, training):
        if part.node not in calls:
            explained.operators.append(_operator(part, by_node.get(part.node), profile))
    for chain, again in found.items():
        sums = prices.joined_gradients(chain, profile) if training else Price()
        if sums.kernels:
            shape = sizes(value_of(chain.result))
            explained.operators.append(Operator(SUMS, shape, Price(), sums, *bound_of(sums, profile), chain.line))
        explained.lines.append(_advice(chain, profile, training, again))


def _operator(part: Part, line: str | None, profile: Profile) -> Operator:
    node, op = part.node, operation(part.node)
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    bound, why = bound_of(part.forward if part.forward.kernels else part.backward, profile)
    if part.unknown:
        why += f"; of {', '.join(part.unknown)} only the bytes are known"
    if part.within:
        why += f"; in {part.within}"
    name = op.name if op is not None and op.name not in MOVING else target
    shapes = [sizes(tensor) for tensor in results_of(node) or given_to(node)]
    return Operator(name, shapes[0], part.forward, part.backward, bound, why, line)


def bound_of(price: Price, profile: Profile) -> tuple[str, str]:
    """What limits an operator, and what follows for fusion."""
    intensity = price.flops / price.bytes if price.bytes else 0.0
    moving = price.bytes / profile.bandwidth
    starting = profile.fixed * price.kernels if price.kernels > 1 else 0.0
    if price.computing > max(1.2 * moving, starting):
        return "compute", f"compute-bound ({intensity:.0f} flops a byte): leave it to the library"
    if moving < profile.fixed * price.kernels:
        return "launch", "launch-bound: its tensors are small, only fewer launches help"
    return "memory", f"memory-bound ({intensity:.1f} flops a byte)"


def _advice(chain: Chain, profile: Profile, training: bool, again: bool) -> Advice:
    """`again`: forward runs once more before backward."""
    whole = not prices.left_to_pytorch(chain)
    before, after = (price(chain, profile, training, whole=whole) for price in (prices.of_chain, prices.of_line))
    if again:
        before, after = ((forward, backward + forward) for forward, backward in (before, after))
    saved = saved_by(chain.nodes) if training else 0
    return Advice(
        chain.line,
        sizes(value_of(chain.result)),
        str(value_of(chain.result).dtype).removeprefix("torch."),
        before,
        after,
        (saved, _saved_by_line(chain) if training else 0),
        _reason(chain, before, after, profile, training),
    )


def _advice_of_head(head: Head, profile: Profile, training: bool, again: bool) -> Advice:
    """PyTorch saves a number for each logit; in its place are the gradients that forward makes, or the logits."""
    before, after = prices.of_head(head, profile, training, again)
    if again:
        before, after = ((forward, backward + forward) for forward, backward in (before, after))
    gradient = 0 if head.layer is None or again else size_of(value_of(head.layer.taken[0]))
    saved = size_of(value_of(head.given["input"])), size_of(value_of(head.source)) + gradient
    return Advice(
        head.line,
        sizes(value_of(head.given["input"])),
        str(value_of(head.logits).dtype).removeprefix("torch."),
        before,
        after,
        saved if training else (0, 0),
        _reason_of_head(head, profile, training),
    )


def _advice_of_groups(groups: Groups, profile: Profile, training: bool, again: bool) -> Advice:
    before, after = prices.of_groups(groups, profile, training)
    if again:
        before, after = ((forward, backward + forward) for forward, backward in (before, after))
    result = value_of(groups.result)
    saved = (saved_by(frozenset(groups.nodes)), size_of(value_of(groups.x))) if training else (0, 0)
    fewer = sum(before, Price()).bytes / max(sum(after, Price()).bytes, 1)
    reason = f"memory-bound: {fewer:.1f} times fewer bytes"
    return Advice(groups.line, sizes(result), str(result.dtype).removeprefix("torch."), before, after, saved, reason)


def _reason_of_head(head: Head, profile: Profile, training: bool) -> str:
    """Whether logits are made, and what it costs that others read them."""
    size = f"{size_of(value_of(head.logits)) / 1e6:,.4g} MB"
    if head.layer is not None:
        return f"the logits, {size}, are never made"
    if head.unread is None:
        return "memory-bound: logits are read once in each direction"
    beside = [node for node in head.unread.nodes if node not in head.nodes]
    here, alone = (sum(prices.of_head(h, profile, training, False)[1], Price()) for h in (head, head.unread))
    for side in (False, True) if training else (False,):
        here = sum((of_node(node, profile, side) for node in beside), here)
    less = here.seconds - alone.seconds
    time = f"{1e3 * abs(less):.3g} ms {'less' if less > 0 else 'more'}"
    gradient = ", and as much for their gradient" if training else ""
    return f"others read the logits: {size}{gradient}; if nobody did, they would never be made, in {time}"


def _saved_by_line(chain: Chain) -> int:
    """Without the contraction's matrix."""
    parts: list[list[str]] = [[]]
    for word in chain.words:
        if about(word).kind == "contraction":
            parts.append([])
        elif about(word).kind != "keep" or parts[-1]:
            parts[-1].append(word)
    tensors = [value_of(chain.result if i or len(parts) == 1 else chain.x) for i in range(len(parts))]
    lines = [(_parse(" | ".join(words)), of) for words, of in zip(parts, tensors) if words]
    return sum(line.cost(sizes(of), of.dtype).saved_bytes for line, of in lines)


def _reason(chain: Chain, before, after, profile: Profile, training: bool) -> str:
    """A sentence on what a line changes."""
    total, left = sum(before, Price()), sum(after, Price())
    if prices.has_own_product(chain, profile, training):
        name = str(value_of(chain.x).dtype).removeprefix("torch.")
        own, library = profile.own_products[name], profile.products[name]
        said = f"compute-bound: {own / library:.2f} times as many operations a second as the library's product"
        last = about(chain.words[-1])
        is_layer = last.is_bias or last.kind == "contraction"
        return said if is_layer else f"{said}, what stands behind it stays in a core's cache"
    if total.bytes / profile.bandwidth < profile.fixed * total.kernels / 2:
        return f"launch-bound: {left.kernels} kernels in the place of {total.kernels}"
    words = [f"memory-bound: {total.bytes / max(left.bytes, 1):.1f} times fewer bytes"]
    if not chain.has("row", "dropout"):
        words.append("torch.compile fuses element-wise chains as well")
    elif total.bytes < 1.1 * left.bytes:
        words = ["memory-bound: as many bytes, moved at copy's speed"]
    return "; ".join(words)
