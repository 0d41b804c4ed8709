"""A whole program from a source of chance: `random.Random`, or hypothesis' own."""

from __future__ import annotations

import random

from fuzz.program import effects, known, pure, regions, views  # noqa: F401  they register what statements are drawn from
from fuzz.program.builder import Builder, Hopeless, Skip
from fuzz.program.operands import fresh
from fuzz.program.programs import LENGTH, Program

__all__ = ["build"]

DYNAMIC = 0.12
MODES = (
    [("training",)] * 8 + [("training", "no_grad")] * 3 + [("no_grad",)] * 3 + [("inference",), ("no_grad", "training")]
)
RAISING = (
    "{0}.view(7, 13)",
    "{0} + torch.ones(17)",
    "F.layer_norm({0}, (19,))",
    "{0} @ torch.ones(23, 2)",
    "torch.cat([{0}, torch.ones(3, 1, 2, 1, 1)])",
)


def build(chance: random.Random) -> Program:
    """Draws one."""
    while True:
        try:
            return _built(chance)
        except Hopeless:
            continue


def _built(chance: random.Random) -> Program:
    dynamic = chance.random() < DYNAMIC
    lengths = chance.choice([(3, 5, 6), (5, 4, 9, 7), (6, 3, 5, 7)]) if dynamic else (chance.choice([2, 3, 4, 6, 8]),)
    b = Builder(chance, lengths)
    if b.often(0.3):
        b.attribute("{} = nn.Parameter(R(4))", "w")
    begun(b, dynamic)
    count = chance.randrange(2, 9)
    b.steps(count)
    if b.often(0.03):
        raising(b)
    modes = b.one_of(("training",), ("training",), ("training", "no_grad"), ("no_grad",))
    whole = tuple(b.inputs), tuple(b.state), tuple(b.statements), returned(b)
    return Program(*whole, lengths, modes, twice=b.often(0.4), shapes=shapes_of(b))


def begun(b: Builder, dynamic: bool) -> None:
    """The first input, or two."""
    length = LENGTH if dynamic else str(b.lengths[0])
    columns = b.one_of("4", "6", "8")
    for _ in range(b.one_of(1, 1, 2)):
        square = (length, length) if not dynamic else (length, columns)
        batch, heads = b.one_of("1", "2", "3", "4"), b.one_of("1", "2", "4")
        shape = b.one_of(
            (length, columns),
            (batch, length, columns),
            (b.one_of("2", "3"), length, columns),
            ("2", heads, length, columns),
            square,
            (columns,),
        )
        dtype = ", dtype=torch.float32" if b.often(0.1) else ""
        fresh(b, shape, dtype, b.often(0.85))


def raising(b: Builder) -> None:
    """One statement that PyTorch refuses, behind the others."""
    from fuzz.program.programs import Statement

    name = b.new()
    b.statements.append(Statement(f"{name} = {b.one_of(*RAISING).format(b.row())}", (name,)))


def returned(b: Builder) -> tuple[str, ...]:
    """The last value, and others: intermediates, inputs, views, the same one twice."""
    made = [n for n in b.names if not n.startswith("self") and not b[n].is_nested]
    if not made:
        raise Hopeless
    results = [made[-1]]
    unused = [
        n for n in made if not n.startswith("x") and not any(n in s.uses for s in b.statements if n not in s.binds)
    ]
    results += [n for n in unused if n not in results and b.often(0.8)]
    for _ in range(b.one_of(0, 0, 1, 1, 2)):
        kind = b.chance.random()
        if kind < 0.6:
            results.append(b.chance.choice(made))
        elif kind < 0.7:
            results.append(results[0])
        elif kind < 0.85:
            view = b.one_of("{0}.mT", "{0}[0]", "{0}.unsqueeze(0)", "{0}.view(-1)", "{0}.detach()").format(b.pick())
            if b.runs(view):
                results.append(view)
        else:
            results.append(b.chance.choice(made) + ".sum()")
    return tuple(results)


def shapes_of(b: Builder) -> dict[str, tuple[str, str]]:
    found = {}
    for name in b.names:
        try:
            value = b[name]
            if value.is_nested:
                continue
            found[name] = (", ".join(b.shape(name)), str(value.dtype))
        except Skip:
            continue
    return found
