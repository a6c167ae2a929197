"""What runs in vLLM's interpreter, as far as it needs no vLLM: every module of the product can be
imported, and an inner name that this vLLM does not have is told by its name.
"""

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import operators.engine.vllm
from operators.engine.vllm import internals, server, start
from operators.engine.vllm.process import MARK
from operators.models.folders import ModelError

FOLDER = Path(operators.engine.vllm.__file__).parent


@pytest.mark.parametrize("name", [found.name for found in pkgutil.iter_modules([str(FOLDER)])])
def test_every_module_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"operators.engine.vllm.{name}")


def test_the_server_finds_this_project_s_packages_wherever_it_is_started(tmp_path: Path) -> None:
    """And none of the modules beside it by bare names, which other packages may have."""
    program = (
        "import runpy, sys;"
        f"sys.path[0] = {str(FOLDER)!r};"
        f"sys.path = [p for p in sys.path if p != {str(start.TREE)!r}];"
        f"space = runpy.run_path({str(FOLDER / 'start.py')!r}, run_name='__mp_main__');"
        f"assert {str(FOLDER)!r} not in sys.path;"
        "import operators.engine.vllm.rank, transport, dataflow; print(operators.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, MARK: "vllm-test"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.strip() == str(start.TREE / "operators" / "__init__.py"), done.stderr


def test_a_name_that_vllm_does_not_have_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = ModuleType("vllm")
    vllm.__version__ = "9.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    for module, names in internals.NAMES.items():
        made = ModuleType(module)
        for name in names:
            setattr(made, name, type(name, (), dict.fromkeys(internals.RECORDING)))
        monkeypatch.setitem(sys.modules, module, made)
    assert internals.names().BakeSink
    layerwise = "vllm.model_executor.model_loader.reload.layerwise"
    monkeypatch.delattr(sys.modules[layerwise], "finalize_layerwise_reload")
    with pytest.raises(ModelError, match=r"found version 9\.9 without .*finalize_layerwise_reload"):
        internals.names()
    monkeypatch.setitem(sys.modules, layerwise, None)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"found version 9\.9 without .*layerwise"):
        internals.names()


@pytest.mark.parametrize(("budget", "rows"), [(10**9, 4), (2_100, 2), (10, 1)])
def test_the_cache_holds_all_slots_or_as_many_full_rows_as_the_budget_allows(
    budget: int, rows: int
) -> None:
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
    assert server.cache_room(config, 4, 26, budget) == rows * row_bytes + page_bytes
