"""What `import dataflow` finds: streams that are closed, and files of the user's that hide its
packages.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import dataflow_rl
from dataflow.system.child import ROOT
from dataflow.system.first import stranger

FAKES = """
import json, sys
from dataflow import Graph, Model, run
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from dataflow.worker import worker
worker.preload = lambda graph: None
with open(sys.argv[1], "w") as file:
    g, model = Graph("fakes"), Model("m")
    generator, trainer = FakeGenerator(model=model), FakeTrainer(model=model, prompts_per_step=2)
    trainer(generator(g.source(FakePrompts(size=4))))
    g.feedback(trainer.weights, generator, max_staleness=4)
    json.dump([file.fileno(), run(g, runs=sys.argv[2]).steps, sys.stdin.read()], file)
print("printed"), print("told", file=sys.stderr)
"""


def python(*arguments: str, cwd: Path, closed: str = "") -> "subprocess.CompletedProcess[str]":
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("closed", ["</dev/null >&-", "<&- >&- 2>&-"])
def test_a_run_goes_on_where_streams_are_closed_and_nothing_else_takes_their_numbers(
    closed: str, tmp_path: Path
) -> None:
    done = python(
        "-c", FAKES, str(tmp_path / "said"), str(tmp_path / "runs"), cwd=tmp_path, closed=closed
    )
    assert done.returncode == 0, done.stderr
    number, steps, heard = json.loads((tmp_path / "said").read_text())
    assert number > 2 and steps == 2 and heard == ""


@pytest.mark.parametrize(
    ("name", "said", "status"),
    [
        (
            "transport",
            (
                "ImportError: 'transport' is {file}, which hides Dataflow RL's package of that name"
                " at {root}"
            ),
            1,
        ),
        (
            "operators",
            "note: 'operators' is {file}, which hides Dataflow RL's package of that name at {root}",
            0,
        ),
    ],
)
def test_a_users_file_that_hides_a_package_is_named(
    name: str, said: str, status: int, tmp_path: Path
) -> None:
    file = tmp_path / f"{name}.py"
    file.touch()
    (tmp_path / "program.py").write_text("import dataflow")
    done = python("program.py", cwd=tmp_path)
    assert said.format(file=file, root=ROOT) in done.stderr and done.returncode == status


def test_a_users_folder_that_hides_a_package_is_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where this project is installed in place, a folder without a module of its own comes first,
    too.
    """
    found = SimpleNamespace(origin=None, submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert stranger("operators") == tmp_path
    with pytest.raises(ImportError, match=f"'dataflow' is {tmp_path}, and not Dataflow RL's"):
        dataflow_rl.check()


def test_the_command_says_which_other_package_it_has_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dataflow.py").touch()
    done = python("-m", "dataflow_rl", cwd=tmp_path)
    assert (
        f"'dataflow' is {tmp_path / 'dataflow.py'}, and not Dataflow RL's at {ROOT / 'dataflow'}"
        in done.stderr
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (tmp_path / "dataflow").mkdir()
    (other := tmp_path / "dataflow" / "__init__.py").touch()
    monkeypatch.setattr(dataflow_rl, "ROOT", tmp_path)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(other))
    )
    with pytest.raises(
        ImportError, match="is of another project called 'dataflow'; pip uninstall dataflow, then"
    ):
        dataflow_rl.check()
