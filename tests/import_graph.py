"""The graph of the tree's imports at the top of its files; one within a function, or for types
alone, is none: it waits for what the function builds.
"""

import ast
import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parent.parent


def modules(*packages: str) -> dict[str, Path]:
    """By dotted name, the files of some packages."""
    return {dotted(path): path for package in packages for path in (ROOT / package).rglob("*.py")}


def dotted(path: Path) -> str:
    """The name by which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parse(path: Path) -> ast.Module:
    """A file's syntax tree; no collection of garbage looks through it: two thirds of the time."""
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


parsed = functools.cache(parse)
"""The same, once for all tests."""


def statements(body: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """Statements, and all that stand within them."""
    for node in body:
        if isinstance(node, ast.stmt):
            yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(node, part, ()))


def at_the_top(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the file is imported."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from at_the_top(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            for part in ("body", "orelse", "finalbody"):
                yield from at_the_top(getattr(node, part, ()))


def imported(name: str, path: Path) -> Iterator[str]:
    """Every dotted name that a module's imports could stand for: of `from a import b`, `a.b`."""
    for node in at_the_top(parsed(path).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            above = base[: len(base) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def imports(known: dict[str, Path]) -> "nx.DiGraph[str]":
    """Which of these modules imports which."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(known)
    for name, path in known.items():
        for other in imported(name, path):
            while other and other not in known:
                other = other.rpartition(".")[0]
            if other and other != name:
                graph.add_edge(name, other)
    return graph


def merged(graph: "nx.DiGraph[str]", place: Callable[[str], str]) -> "nx.DiGraph[str]":
    """The same graph with all modules of one place taken for one."""
    found: nx.DiGraph[str] = nx.DiGraph()
    found.add_edges_from((place(a), place(b)) for a, b in graph.edges if place(a) != place(b))
    return found


def circles(graph: "nx.DiGraph[str]") -> set[frozenset[str]]:
    """The sets of modules that import each other."""
    return {frozenset(each) for each in nx.strongly_connected_components(graph) if len(each) > 1}


def crowded(folders: Iterable[str], most: int) -> set[str]:
    """Folders, with all below them, that hold more modules than so many."""
    found = {path.parent for folder in folders for path in (ROOT / folder).rglob("*.py")}
    return {str(path.relative_to(ROOT)) for path in found if len(list(path.glob("*.py"))) > most}
