"""A law, the test whose name states it, and the code that keeps it."""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

from .changes import Change
from .places import place

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Law:
    """One law, and one way to break it."""

    says: str
    """The law, in words of the design."""
    test: str
    """The name of the test that states it; with its parameters where they choose one of several."""
    symbol: str
    """What keeps it, as `package:Name.method`; the module, or any package above it in which no
    other has that name."""
    change: Change
    """What is done to that code."""
    deleted: str
    """What is deleted by that, in words."""

    @property
    def name(self) -> str:
        """The test's name and what is deleted: one per entry."""
        return f"{self.test}: {self.deleted}"

    @property
    def test_id(self) -> str:
        """The test with its file, as pytest names it; LookupError where no file, or more than one,
        has it.
        """
        found = _files().get(self.test.split("[")[0], [])
        if len(found) != 1:
            raise LookupError(f"'{self.test}' stands in {found}; one file of tests has to have it")
        return f"{found[0]}::{self.test}"

    def broken(self, root: Path = ROOT) -> tuple[Path, str]:
        """The module that keeps the law in a tree, its text without that; ValueError where the
        change does not fit.
        """
        try:
            at = place(self.symbol, root)
            whole = ast.unparse(at.module)
            self.change(at)
            made = ast.unparse(ast.fix_missing_locations(at.module))
            ast.parse(made)
        except (ValueError, LookupError, AttributeError, SyntaxError) as error:
            raise ValueError(
                f"'{self.says}' ({self.deleted}), kept by {self.symbol}: {error}"
            ) from error
        if made == whole:
            raise ValueError(
                f"'{self.says}' ({self.deleted}), kept by {self.symbol}: the change changes nothing"
            )
        return at.path, made


@functools.cache
def _files() -> dict[str, list[str]]:
    """Of every test, the files that have one of that name."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    return found
