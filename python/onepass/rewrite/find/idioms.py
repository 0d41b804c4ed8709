"""Words that models write out: their formulas (`onepass.reference`), found in a graph however its sums and products are
ordered."""

from __future__ import annotations

import ast
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from onepass import reference
from onepass.graph.operations import known, operation, uncast, value_of
from onepass.word import about

__all__ = ["Found", "check", "find"]

CLOSE = {torch.float64: 1e-13}
"""How far a constant may be from a formula's, relatively; half a unit of float32 in narrower types."""

DEEPEST = 16
"""Sums of sums, or products of products."""


def check(formula: str, numbers: tuple[str, ...]) -> None:
    """Raises ValueError for a formula that no graph could be found to have."""
    try:
        nodes = list(ast.walk(_parsed(formula, numbers)))
    except SyntaxError as error:
        raise ValueError(f"expected a formula, but got {formula!r}: {error.msg}") from None
    names = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n, _Number)}
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    parts = (ast.BinOp, ast.Call, ast.Name, ast.Constant, ast.operator, ast.expr_context)
    strange = [type(n).__name__ for n in nodes if not isinstance(n, parts)]
    if strange or names - called != {"x"} or called - known():
        raise ValueError(
            f"expected a formula of x, {', '.join(numbers) or 'numbers'}, + - * / ** and functions of PyTorch such as "
            f"sin, but got {formula!r}"
        )
    missing = set(numbers) - {n.id for n in nodes if isinstance(n, _Number)}
    if missing:
        raise ValueError(f"expected a formula with {', '.join(sorted(missing))}, but got {formula!r}")


@dataclass
class Found:
    """A formula in a graph: its word, what it is of, and the nodes that compute it; `passes` with the casts on the way
    that others need as well."""

    word: str
    x: fx.Node
    nodes: set[fx.Node]
    passes: frozenset[fx.Node]


@dataclass
class _Match:
    close: float
    names: dict[str, object] = field(default_factory=dict)
    nodes: frozenset[fx.Node] = frozenset()

    def seen(self, nodes: Iterable[fx.Node], **names: object) -> _Match:
        """With more nodes and names."""
        return _Match(self.close, {**self.names, **names}, self.nodes | frozenset(nodes))


def find(root: fx.Node) -> Found | None:
    """The formula of which the node is the last operation, if nothing but x, perhaps cast, and the result is used
    elsewhere."""
    for word, formula, numbers in _formulas():
        for match in _matches(_parsed(formula, numbers), root, _Match(CLOSE.get(value_of(root).dtype, 6e-8))):
            nodes = {n for n in match.nodes if n is root or uncast(n) is n or set(n.users) <= match.nodes}
            if all(set(n.users) <= nodes for n in nodes - {root}):
                found = ", ".join(repr(match.names[name]) for name in numbers if name in match.names)
                return Found(f"{word}({found})" if found else word, match.names["x"], nodes, match.nodes)
    return None


def _formulas() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Words, their formulas, and the names of their numbers."""
    for word, there in reference.IN_TORCH.items():
        if there.formulas:
            numbers = tuple(filter(None, about(word).parameter_name.split(", ")))
            yield from ((word, formula, numbers) for formula in there.formulas)


class _Number(ast.Name):
    """A name of a number, not of a tensor, or of its inverse."""

    inverse = False


class _Simplest(ast.NodeTransformer):
    """As operations are read: what is divided by a number is multiplied by its inverse, a negative is a product."""

    def __init__(self, numbers: tuple[str, ...]) -> None:
        self.numbers = numbers

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return _Number(node.id, node.ctx) if node.id in self.numbers else node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        inside = self.visit(node.operand)
        return ast.BinOp(ast.Constant(-1.0), ast.Mult(), inside) if isinstance(node.op, ast.USub) else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, ast.Div) and isinstance(right, _Number):
            right = _Number(right.id, right.ctx)
            right.inverse = True
            return ast.BinOp(left, ast.Mult(), right)
        if isinstance(node.op, ast.Div) and isinstance(right, ast.Constant):
            return ast.BinOp(left, ast.Mult(), ast.Constant(1 / right.value))
        return ast.BinOp(left, node.op, right)


@functools.cache
def _parsed(formula: str, numbers: tuple[str, ...]) -> ast.expr:
    return _Simplest(numbers).visit(ast.parse(formula, mode="eval").body)


def _matches(pattern: ast.expr, node: object, so_far: _Match) -> Iterator[_Match]:
    """Every way in which the pattern is what the node computes."""
    if isinstance(pattern, ast.Constant):
        if isinstance(node, (int, float)) and math.isclose(node, pattern.value, rel_tol=so_far.close):
            yield so_far
    elif isinstance(pattern, _Number):
        if isinstance(node, (int, float)):
            yield from _binds_number(pattern, float(node), so_far)
    elif isinstance(pattern, ast.Name):
        yield from _binds(pattern.id, node, so_far)
    elif isinstance(node, fx.Node):
        source, passed = _behind_casts(node)
        op = operation(source)
        if op is None:
            return
        name, arguments = _operation_of(pattern)
        inside = so_far.seen({source, *passed})
        if name in ("add", "mul") and op.name == name:
            yield from _permuted(name, pattern, source, inside)
        elif op.name == name and len(op.arguments) == len(arguments):
            yield from _each(arguments, op.arguments, inside)


def _binds(name: str, node: object, so_far: _Match) -> Iterator[_Match]:
    bound = so_far.names.get(name)
    if isinstance(node, fx.Node):
        source, passed = _behind_casts(node)
        if bound is None or bound is source:
            yield so_far.seen(passed, **{name: source})


def _binds_number(pattern: _Number, found: float, so_far: _Match) -> Iterator[_Match]:
    if math.isnan(found):  # no line has one
        return
    number = 1 / found if pattern.inverse and found else found
    bound = so_far.names.get(pattern.id)
    if bound is None:
        yield so_far.seen((), **{pattern.id: number})
    elif math.isclose(bound, number, rel_tol=1e-6):
        yield so_far


def _behind_casts(node: fx.Node) -> tuple[fx.Node, frozenset[fx.Node]]:
    """What a number is cast from, and the casts."""
    source, passed = uncast(node), []
    while node is not source:
        passed.append(node)
        node = operation(node).arguments[0]
    return source, frozenset(passed)


def _each(patterns, nodes, so_far: _Match) -> Iterator[_Match]:
    if not patterns:
        yield so_far
        return
    for match in _matches(patterns[0], nodes[0], so_far):
        yield from _each(patterns[1:], nodes[1:], match)


def _permuted(name: str, pattern: ast.expr, node: fx.Node, so_far: _Match) -> Iterator[_Match]:
    """Sums and products, whose parts may stand in any order and be nested in any way."""
    wanted, wanted_number = _parts_of_pattern(name, pattern)
    parts, number, inner = _parts_of_node(name, node, so_far.nodes)
    named = [part for part in wanted if isinstance(part, _Number)]
    wanted = [part for part in wanted if part not in named]
    if len(parts) != len(wanted) or len(named) > 1:
        return
    if named:
        if not number:
            return
        rest = number - wanted_number if name == "add" else number / wanted_number
        so_far = next(_binds_number(named[0], float(rest), so_far), None)
    if so_far is None or not (named or math.isclose(number, wanted_number, rel_tol=so_far.close)):
        return
    inside = so_far.seen(inner)
    for order in itertools.permutations(parts):
        yield from _each(wanted, list(order), inside)


def _parts_of_pattern(name: str, pattern: ast.expr) -> tuple[list[ast.expr], float]:
    neutral = 0.0 if name == "add" else 1.0
    if isinstance(pattern, ast.Constant):
        return [], float(pattern.value)
    if not isinstance(pattern, ast.BinOp) or _OPERATORS[type(pattern.op)] != name:
        return [pattern], neutral
    return _joined(name, _parts_of_pattern(name, pattern.left), _parts_of_pattern(name, pattern.right))


def _parts_of_node(
    name: str, node: object, known: frozenset[fx.Node], depth: int = 0
) -> tuple[list[fx.Node], float, frozenset]:
    """The parts that are tensors, the numbers' sum or product, and the nodes that join them. A part may be a sum or a
    product itself, of those that no formula is as long as."""
    if isinstance(node, (int, float)):
        return [], float(node), frozenset()
    op = operation(node)
    joins = op is not None and op.name == name and (node in known or len(node.users) == 1) and depth < DEEPEST
    if not joins:
        return [node], 0.0 if name == "add" else 1.0, frozenset()
    sides = [_parts_of_node(name, argument, frozenset(), depth + 1) for argument in op.arguments]
    parts, number = _joined(name, sides[0][:2], sides[1][:2])
    return parts, number, frozenset({node}).union(*(inner for *_, inner in sides))


def _joined(name: str, left: tuple[list, float], right: tuple[list, float]) -> tuple[list, float]:
    return left[0] + right[0], left[1] + right[1] if name == "add" else left[1] * right[1]


_OPERATORS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"}


def _operation_of(pattern: ast.expr) -> tuple[str, list[ast.expr]]:
    if isinstance(pattern, ast.BinOp):
        return _OPERATORS[type(pattern.op)], [pattern.left, pattern.right]
    return pattern.func.id, pattern.args
