"""A law, the test whose name states it, and the code that keeps it."""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Law:
    """One law, and one way to break it."""

    says: str
    """The law, in words of the design."""
    test: str
    """The id of the test that states it."""
    file: str
    """Where the code that keeps it stands."""
    kept_by: str
    """That code; it stands there once."""
    without: str
    """What takes its place."""
    deleted: str
    """What is deleted by that, in words."""

    @property
    def name(self) -> str:
        """The test's name and what is deleted: one per entry."""
        return f"{self.test.rpartition('::')[2]}: {self.deleted}"

    def broken(self, text: str) -> str:
        """The file's text without what keeps the law; ValueError where it cannot be told what that is."""
        found = text.count(self.kept_by)
        if found != 1:
            raise ValueError(
                f"what keeps '{self.says}' stands {found} times in {self.file}; found no single {self.kept_by!r}; "
                f"say in tests/laws what keeps it now"
            )
        made = text.replace(self.kept_by, self.without)
        ast.parse(made)
        return made


def is_there(test: str) -> bool:
    """Whether a file has the test of an id; its parameters are not looked at."""
    name, _, function = test.partition("::")
    return function.split("[")[0] in _tests(name)


@functools.cache
def _tests(name: str) -> set[str]:
    tree = ast.parse((ROOT / name).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
