"""The decision of `fuse`: prices of a chain's nodes as PyTorch runs them, and of its line in their place."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from torch import fx

from onepass.graph.operations import MOVING, is_tensor, operation, sizes, value_of
from onepass.line import Line, _parse
from onepass.plan import Plan
from onepass.pricing.nodes import counts_of
from onepass.pricing.prices import Price, of_counts, of_node, of_words, size_of
from onepass.pricing.profile import Profile
from onepass.rewrite.find.chains import Chain
from onepass.rewrite.groups import Groups
from onepass.rewrite.heads import Head
from onepass.word import about

__all__ = [
    *("PYTORCHS", "decision", "has_own_product", "is_worth_it", "joined_gradients", "left_to_pytorch"),
    *("of_chain", "of_groups", "of_head", "of_line"),
]


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
    for node in filter(is_tensor, {*chain.nodes, chain.x}):
        uses = sum(user in chain.nodes for user in node.users)
        uses += node in chain.results[1:]
        if uses > 1:
            bytes = 3 * (uses - 1) * size_of(value_of(node))
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
        if about(word).kind == "contraction":
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
    if PYTORCHS in chain.words:
        parts = parts[:1]  # the product adds the bias behind it, as it did; backward writes what it takes again
        again = size_of(value_of(operation(products[0]).arguments[0]))
        backward += Price(again, seconds=profile.moving(again) - profile.moving(0))
    for i, (words, shape) in enumerate(zip(parts, shapes)):
        if i > 0:
            next(operands)  # the contraction's
        line = _parse(" | ".join(words)) if any(about(word).kind != "keep" for word in words) else None
        own = list(itertools.islice(operands, _operands_of(line) if line is not None else 0))
        if line is not None:
            learns = [i > 0 or value_of(chain.x).requires_grad, *(operand.requires_grad for operand in own)]
            there, back = of_words(line, shape, dtype, profile, own, goes_on if i == 0 else in_panels, learns)
            forward, backward = forward + there, backward + back if trains else backward
    if chain.has_linear:
        forward = replace(forward, seconds=forward.seconds - seconds_saved(chain, profile, training))
    return forward, backward


PRODUCTS = ("linear", "addmm", "matmul")
PYTORCHS = "linear(unfused)"
"""A layer whose call takes PyTorch's product, and need not look for a better way."""


def left_to_pytorch(chain: Chain) -> set[fx.Node]:
    """The linear layer of a line that names PyTorch's product."""
    if PYTORCHS not in chain.words:
        return set()
    return {node for node in chain.nodes if (op := operation(node)) is not None and op.name in PRODUCTS}


def _beside(chain: Chain) -> list[fx.Node]:
    """Views, and the products of attention; the product of `linear` is the line's own, if it does not say otherwise."""
    linear = chain.has_linear and PYTORCHS not in chain.words
    names = MOVING if linear else (*MOVING, *PRODUCTS)  # beside a line, too: some copy
    return [node for node in chain.nodes if (op := operation(node)) is not None and op.name in names]


def _of_own_product(node: fx.Node, profile: Profile) -> Price:
    """A linear layer, computed in panels by this package."""
    of_layer = of_counts(counts_of(node, training=False), profile)
    weight = value_of(operation(node).arguments[1])
    seconds = profile.multiplying_itself(of_layer.flops, size_of(weight), weight.dtype)
    computing = seconds - profile.moving(2 * size_of(weight))
    return replace(of_layer, kernels=1, seconds=seconds, host_seconds=profile.call, computing=computing)


def of_head(
    head: Head, profile: Profile, training: bool, nested: bool
) -> tuple[tuple[Price, Price], tuple[Price, Price]]:
    """A loss and what makes its logits, forward and backward: as PyTorch runs it, and what stands in its place. Chunks
    of logits are written and read as all of them would be.

    nested: whether that is in a checkpointed block, where a linear layer's product runs once more for its gradients.
    Elsewhere these are there before, and take the gradient of the loss as a factor.
    """
    now, after = [], []
    logits, target, shape = value_of(head.logits), value_of(head.given["target"]), sizes(value_of(head.given["input"]))
    learns = [logits.requires_grad, False]
    words = of_words(_parse(head.ending), shape, logits.dtype, profile, [target], learns=learns)
    for backward, price in enumerate(words):
        counts = training or not backward
        now.append(sum((of_node(node, profile, bool(backward)) for node in head.nodes if counts), Price()))
        if head.layer is not None:
            price += of_node(head.layer.nodes[-1], profile, bool(backward))
        after.append(price if counts else Price())
    if head.layer is not None and training:
        gradients = 2 * sum(size_of(value_of(node)) for node in (head.source, head.layer.taken[0]))
        times = Price(gradients, 0, 2, profile.moving(gradients, kernels=2), 2 * profile.call)
        after[1] += of_node(head.layer.nodes[-1], profile) if nested else times
    return tuple(now), tuple(after)


def of_groups(groups: Groups, profile: Profile, training: bool) -> tuple[tuple[Price, Price], tuple[Price, Price]]:
    """A group normalisation and what stands beside it, forward and backward: as PyTorch runs it, and as a line."""
    x, line = value_of(groups.x), _parse(groups.line)
    batch, channels, *others = sizes(x)
    shape = batch, groups.groups, channels // groups.groups * math.prod(others)
    learns = [x.requires_grad, *(value_of(node).requires_grad for node in groups.operands)]
    operands = [value_of(node) for node in groups.operands]
    after = of_words(line, shape, x.dtype, profile, operands, learns=learns)
    learned = training and value_of(groups.result).requires_grad
    before, back = (
        sum((of_node(node, profile, backward) for node in groups.nodes), Price()) for backward in (False, True)
    )
    return (before, back if learned else Price()), (after[0], after[1] if learned else Price())


def has_own_product(chain: Chain, profile: Profile, training: bool) -> bool:
    """Whether a line with `linear` multiplies by this package's own code on the device: in panels, on the CPU. Not in
    training, where backward takes the library's products."""
    there = str(value_of(chain.x).dtype).removeprefix("torch.") in profile.own_products
    if training or not there or not chain.has_linear:
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
