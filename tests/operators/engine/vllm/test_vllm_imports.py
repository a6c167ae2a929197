"""What runs in vLLM's interpreter, as far as it needs no vLLM: its imports by bare names, which no
type check follows, and the size of its cache.
"""

import ast
import importlib
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

import operators.engine.vllm

FOLDER = Path(operators.engine.vllm.__file__).parent


def bare_imports(file: str) -> list[ast.ImportFrom]:
    """Those of the branch that no type checker reads."""
    body = ast.parse((FOLDER / file).read_text()).body
    branches = [node for node in body if isinstance(node, ast.If)]
    nodes = [node for branch in branches for node in branch.orelse]
    return [node for node in nodes if isinstance(node, ast.ImportFrom)]


@pytest.mark.parametrize("file", ["server.py", "transfer.py"])
def test_a_bare_import_names_a_module_of_the_folder_and_what_it_has(file: str) -> None:
    imports = bare_imports(file)
    assert imports
    for node in imports:
        module = importlib.import_module(f"operators.engine.vllm.{node.module}")
        assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize(("budget", "rows"), [(10**9, 4), (2_100, 2), (10, 1)])
def test_the_cache_holds_all_slots_or_as_many_full_rows_as_the_budget_allows(
    budget: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    model = SimpleNamespace(
        get_num_kv_heads=lambda parallel: 1,
        get_num_layers=lambda parallel: 2,
        get_head_size=lambda: 4,
        dtype=SimpleNamespace(itemsize=2),
    )
    config = SimpleNamespace(
        model_config=model, parallel_config=None, cache_config=SimpleNamespace(block_size=8)
    )
    page_bytes, row_bytes = 256, 4 * 256
    cache_room = runpy.run_path(str(FOLDER / "server.py"))["cache_room"]
    assert cache_room(config, 4, 26, budget) == rows * row_bytes + page_bytes
