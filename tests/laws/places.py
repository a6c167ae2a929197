"""Where the code stands that a symbol names: in a module, or in the only module of a package that
has it.
"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Place:
    """A definition in the syntax tree of its module; both may be changed."""

    path: Path
    module: ast.Module
    definition: Definition


def place(symbol: str, root: Path) -> Place:
    """Find `package.or.module:Name.method` in a tree; LookupError where nothing, or more than one,
    has that name.
    """
    package, _, names = symbol.partition(":")
    found = []
    for path in _modules(root, package, set(names.split("."))):
        module = ast.parse(path.read_text())
        found += [
            Place(path, module, definition)
            for definition in _defined(module.body, names.split("."))
        ]
    if len(found) != 1:
        where = [f"{each.path.relative_to(root)}:{each.definition.lineno}" for each in found]
        raise LookupError(
            f"'{names}' stands {len(found)} times in {package}; found it in {where}; "
            f"say in tests/laws what it is called now, or name a room further down"
        )
    return found[0]


def _modules(root: Path, package: str, names: set[str]) -> list[Path]:
    """The module of that name alone, where it is one; otherwise those of the package and below it
    that define names.
    """
    folder = root.joinpath(*package.split("."))
    module = folder.with_suffix(".py")
    return (
        [module]
        if module.exists()
        else [path for path, defined in _vocabulary(folder).items() if names <= defined]
    )


@functools.cache
def _vocabulary(folder: Path) -> dict[Path, set[str]]:
    """Of every module below a folder, the words that it may define something by."""
    sign = re.compile(r"(?:def|class) (\w+)|^(\w+)(?:: .*)? =", re.MULTILINE)
    files = {path: sign.findall(path.read_text()) for path in sorted(folder.rglob("*.py"))}
    return {path: {word for found in pairs for word in found} for path, pairs in files.items()}


def _defined(block: list[ast.stmt], names: list[str]) -> Iterator[Definition]:
    for statement in block:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if (
                statement.name == names[0]
            ):
                if names[1:]:
                    yield from _defined(statement.body, names[1:])
                elif not any(ast.unparse(each) == "overload" for each in statement.decorator_list):
                    yield statement
            case (
                ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name))
            ) if [name] == names:
                yield statement
