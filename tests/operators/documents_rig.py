"""Python in the documentation of other projects, read where a checkout of it lies; nothing of it is
kept here.
"""

from __future__ import annotations

import ast
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

BUILTIN = {"re", "asyncio", "json", "math", "typing", "difflib"}
"""Modules whose imports come along."""


def checkout(variable: str) -> Path:
    """The folder that an environment variable names; the test is skipped where it names none."""
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(
            f"{variable} does not name a checkout of the project whose documentation is read"
        )
    return Path(folder)


@dataclass(frozen=True)
class DocumentedFunction:
    """A function as a page has it, with the example that follows it."""

    page: str
    name: str
    source: str
    """With the imports that its block has, of the standard library."""
    arguments: tuple[str, ...]
    example: str
    """The lines of an interactive session, if the next block is one."""

    def __str__(self) -> str:
        return f"{self.page}:{self.name}({', '.join(self.arguments)})"

    def written(self, folder: Path) -> str:
        """The place of the function, in a file of its own, as `find` takes it."""
        file = folder / f"{self.name}_{abs(hash(self.source))}.py"
        file.write_text(self.source)
        return f"{file}:{self.name}"

    def loaded(self) -> Callable[..., Any]:
        """The function itself."""
        names: dict[str, Any] = {}
        exec(compile(self.source, self.page, "exec"), names)
        return names[self.name]  # type: ignore[no-any-return]


def functions(root: Path, pattern: str) -> Iterator[DocumentedFunction]:
    """All functions in blocks of Python on these pages, methods left out."""
    for page in sorted(root.glob(pattern)):
        blocks = list(_blocks(page.read_text("utf-8"), page.suffix))
        for at, block in enumerate(blocks):
            try:
                tree = ast.parse(block)
            except SyntaxError:
                continue
            lines = [
                ast.unparse(node)
                for node in tree.body
                if isinstance(node, ast.Import) and all(each.name in BUILTIN for each in node.names)
            ]
            following = (
                blocks[at + 1] if at + 1 < len(blocks) and blocks[at + 1].startswith(">>>") else ""
            )
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_method(
                    tree, node
                ):
                    source = textwrap.dedent(ast.get_source_segment(block, node, padded=True) or "")
                    given = [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
                    text = "\n".join([*lines, source, ""])
                    yield DocumentedFunction(page.name, node.name, text, tuple(given), following)


def class_block(page: Path, name: str) -> str:
    """The first block of a page that defines a class, its classes and imports alone."""
    for block in _blocks(page.read_text("utf-8"), page.suffix):
        tree = ast.parse(block) if f"class {name}" in block else None
        if tree is not None:
            kept = [each for each in tree.body if isinstance(each, ast.Import | ast.ClassDef)]
            return "\n\n\n".join(ast.get_source_segment(block, each) or "" for each in kept)
    raise LookupError(f"{page} defines no class {name}")


def called_with(function: DocumentedFunction) -> tuple[dict[str, object], object]:
    """The keywords of the call that its example makes, and what it says comes of it."""
    session = [
        line[4:] for line in function.example.splitlines() if line.startswith((">>> ", "... "))
    ]
    told = [
        line
        for line in function.example.splitlines()
        if line and not line.startswith((">>>", "..."))
    ]
    names: dict[str, object] = {function.name: lambda **given: given}
    *before, call = ast.parse("\n".join(session)).body
    exec(compile(ast.Module(before, []), function.page, "exec"), names)
    assert isinstance(call, ast.Expr)
    return eval(
        compile(ast.Expression(call.value), function.page, "eval"), names
    ), ast.literal_eval("\n".join(told))


def _is_method(tree: ast.Module, node: ast.AST) -> bool:
    return any(node in each.body for each in ast.walk(tree) if isinstance(each, ast.ClassDef))


def _blocks(text: str, kind: str) -> Iterator[str]:
    if kind == ".md":
        for found in re.finditer(
            r"^([ \t]*)```(?:python|py)[^\n]*\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE
        ):
            yield textwrap.dedent(found[2])
        return
    for found in re.finditer(
        r"^\.\. code(?:-block)?:: python\n((?:[ \t]*\n|[ \t]+.*\n?)+)", text, re.MULTILINE
    ):
        yield textwrap.dedent(found[1]).strip("\n")
