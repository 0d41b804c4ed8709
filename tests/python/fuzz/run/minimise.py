"""Makes a failing program small: what can be left out, or be an input, with the same kind of difference, is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz.program.programs import Input, Program, Statement, names_in

__all__ = ["minimised"]


def minimised(program: Program, fails: Callable[[Program], bool], tries: int = 150) -> Program:
    """The smallest that was found in so many tries."""
    while True:
        for smaller in _smaller(program):
            tries -= 1
            if tries < 0:
                return program
            if fails(smaller):
                program = smaller
                break
        else:
            return program


def _smaller(program: Program) -> Iterator[Program]:
    """Each a step smaller; those that save most first."""
    for i in range(len(program.returns)):
        if len(program.returns) > 1:
            yield _tidy(replace(program, returns=program.returns[:i] + program.returns[i + 1 :]))
    for statement in reversed(program.statements):
        yield from _without(program, statement)
    for i, statement in enumerate(program.statements):
        for shorter in _shorter(statement):
            yield _tidy(replace(program, statements=(*program.statements[:i], shorter, *program.statements[i + 1 :])))
    if program.twice:
        yield replace(program, twice=False)
    if len(program.modes) > 1:
        yield from (replace(program, modes=(mode,)) for mode in program.modes)
    if len(program.lengths) > 2:
        for i in range(len(program.lengths)):
            yield replace(program, lengths=program.lengths[:i] + program.lengths[i + 1 :])
    for i, made in enumerate(program.inputs):
        for plain in _plainer(program, made):
            yield replace(program, inputs=(*program.inputs[:i], plain, *program.inputs[i + 1 :]))
    for made in program.state:
        if made.name not in names_in(program.body):
            yield replace(program, state=tuple(s for s in program.state if s is not made))
    for i, result in enumerate(program.returns):
        for name in names_in(result) - {result}:
            yield replace(program, returns=(*program.returns[:i], name, *program.returns[i + 1 :]))


def _without(program: Program, statement: Statement) -> Iterator[Program]:
    """The program without the statement; what it binds is an input, or one of what it is made of."""
    rest = program.without(statement)
    used = {name for s in rest.statements for name in s.uses} | {n for r in rest.returns for n in names_in(r)}
    missing = [name for name in statement.binds if name in used]
    if not missing:
        yield _tidy(rest)
        return
    if len(rest.returns) > 1 or set(rest.returns) - set(missing):
        returns = tuple(r for r in rest.returns if not names_in(r) & set(missing))
        dependent = {*missing}
        kept = []
        for s in rest.statements:
            if s.uses & dependent:
                dependent |= set(s.binds)
            else:
                kept.append(s)
        returns = tuple(r for r in returns if not names_in(r) & dependent)
        if returns:
            yield _tidy(replace(rest, statements=tuple(kept), returns=returns))
    known = [program.shapes.get(name) for name in missing]
    if all(known):
        for grad in (True, False):
            made = tuple(
                Input(name, _source(*shape), grad and "float" in shape[1]) for name, shape in zip(missing, known)
            )
            yield _tidy(replace(rest, inputs=(*rest.inputs, *made)))


def _source(shape: str, dtype: str) -> str:
    if "float" not in dtype:
        return f"R({shape}) > 0" if dtype == "torch.bool" else f"torch.ones({shape}, dtype={dtype})"
    return f"R({shape})" if dtype == "torch.float64" else f"R({', '.join(filter(None, (shape, f'dtype={dtype}')))})"


def _shorter(statement: Statement) -> Iterator[Statement]:
    if statement.contexts:
        yield replace(statement, contexts=())
    lines = statement.source.splitlines()
    for i in range(1, len(lines) - 1):
        yield replace(statement, source="\n".join(lines[:i] + lines[i + 1 :]))
    if len(lines) > 2 and lines[-1].lstrip().startswith("return"):
        for line in lines[1:-1]:
            name = line.split("=")[0].strip()
            if name.isidentifier() and f"return {name}" not in lines[-1]:
                indent = lines[-1][: len(lines[-1]) - len(lines[-1].lstrip())]
                yield replace(statement, source="\n".join([*lines[:-1], f"{indent}return {name}"]))


def _plainer(program: Program, made: Input) -> Iterator[Input]:
    shape = program.shapes.get(made.name)
    if shape and made.source != _source(*shape) and "float" in shape[1] and "zeros" not in made.source:
        yield replace(made, source=_source(*shape))
    if made.grad:
        yield replace(made, grad=False)


def _tidy(program: Program) -> Program:
    """Without inputs that nothing uses."""
    used = names_in(program.body) | {n for r in program.returns for n in names_in(r)}
    used |= {name for i in program.inputs if i.name in used for name in names_in(i.source)}
    return replace(program, inputs=tuple(i for i in program.inputs if i.name in used))
