"""Real libraries on a disk that is really full: the run is untouched, it is said once, and the rest can be told."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

OWN_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]
PROGRAM = Path(__file__).parent / "full_disks.py"


@pytest.fixture(scope="module")
def may_mount(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where this user may not mount a disk of its own."""
    command = [*OWN_MOUNTS, "mount", "-t", "tmpfs", "none", str(tmp_path_factory.mktemp("mount"))]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except OSError as error:
        pytest.skip(f"no disk can be mounted here: {error}")
    if tried.returncode:
        pytest.skip(f"no disk can be mounted here: {tried.stderr.strip()}")


def ran(library: str, when: str, root: Path, policy: Path) -> dict[str, Any]:
    command = [*OWN_MOUNTS, sys.executable, str(PROGRAM), library, str(root), str(policy), when]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("library", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_run_goes_on_untouched_while_the_disk_of_a_library_is_full(
    library: str, when: str, may_mount: None, policy: Path, tmp_path: Path
) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed: pip install 'dataflow-rl[{library}]'")
    found = ran(library, when, tmp_path, policy)
    assert found["same"], "the losses are those of a run that nobody is told of"
    assert sum("the run goes on" in text for text in found["said"]) == 1, found
    assert sum("tells it the rest" in text for text in found["said"]) == 1, found
    assert found["rest"] == 0 and found["told"], found
