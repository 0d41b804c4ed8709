"""The package has layers: no module imports one that imports it, neither at its top nor within a function."""

import ast
from collections.abc import Iterator
from pathlib import Path

import onepass

PACKAGE = Path(onepass.__file__).parent


def modules() -> dict[str, Path]:
    """The files of the package, by the names of their modules."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        names = ("onepass", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Everything in a module's tree but what stands under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from statements(child)


def names_in(name: str, path: Path) -> Iterator[str]:
    """Full names of what a module imports, a module's or those of things in one."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def prefixes(name: str) -> list[str]:
    """A dotted name and the names of all that it lies in, the longest first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def imports(known: dict[str, Path]) -> dict[str, set[str]]:
    """The modules that each module imports, and the packages around these, which run first; not the packages around
    the module itself, which run before it anyway."""
    graph = {}
    for name, path in known.items():
        graph[name] = set()
        for imported in names_in(name, path):
            found = [prefix for prefix in prefixes(imported) if prefix in known]
            graph[name].update(found[:1], set(found[1:]) - set(prefixes(name)))
    return graph


def circles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Modules that import each other, directly or by way of others."""
    reached = {name: set(targets) for name, targets in graph.items()}
    for middle in graph:
        for targets in reached.values():
            if middle in targets:
                targets |= reached[middle]
    alike = {name: {other for other in reached[name] if name in reached[other]} for name in graph}
    return sorted({tuple(sorted(together | {name})) for name, together in alike.items() if together - {name}})


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": set()}
    assert circles(graph) == [("b", "c")]


def test_no_import_circle():
    found = circles(imports(modules()))
    assert not found, "modules import each other:\n" + "\n".join(map(", ".join, found))


def test_files_of_tests_have_names_of_their_own():
    """Else pytest takes one for the other."""
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert len(names) == len(set(names))
