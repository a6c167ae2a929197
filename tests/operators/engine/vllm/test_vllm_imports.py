"""What vLLM's interpreter imports by bare names from this folder; no type check follows them."""

import ast
from pathlib import Path

import pytest

import operators.engine.vllm

FOLDER = Path(operators.engine.vllm.__file__).parent
BARE = [
    (file.name, imported)
    for file in sorted(FOLDER.glob("*.py"))
    for branch in ast.parse(file.read_text()).body
    if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
    for imported in branch.orelse
    if isinstance(imported, ast.ImportFrom)
]


@pytest.mark.parametrize(("file", "imported"), BARE, ids=lambda value: str(value)[:20])
def test_a_bare_import_names_a_module_of_the_folder_and_what_it_has(
    file: str, imported: ast.ImportFrom
) -> None:
    module = FOLDER / f"{imported.module}.py"
    assert module.is_file(), f"{file} imports {imported.module}, which is no file beside it"
    bound = {
        name
        for node in ast.walk(ast.parse(module.read_text()))
        for name in (
            [node.name]
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            else [target.id for target in node.targets if isinstance(target, ast.Name)]
            if isinstance(node, ast.Assign)
            else []
        )
    }
    assert {alias.name for alias in imported.names} <= bound


def test_the_server_and_the_transfer_have_such_imports() -> None:
    assert {file for file, _ in BARE} >= {"server.py", "transfer.py"}
