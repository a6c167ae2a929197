"""Trackers on disks that are really full: the run goes on, it is said once, and nothing is told
twice or lost.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from disks import REFUSED
from wandb_files import needs_timed_writes

HERE = Path(__file__).parent


pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.timeout(600)]


def made_of(program: str, *arguments: str) -> None:
    """Run it to its end, in mounts of its own."""
    done = subprocess.run(
        [sys.executable, str(HERE / program), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode == REFUSED:
        pytest.skip(f"this user may not mount a disk to fill: {done.stdout.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr


def with_library(name: str, given: str = "") -> Any:
    """A parameter of a slow test, which is skipped where that is not installed. given: empty: the
    library's name.
    """
    lacks = importlib.util.find_spec(name) is None
    reason = f"{name} is not installed: pip install 'dataflow-rl[{name}]'"
    return pytest.param(
        given or name, marks=[pytest.mark.slow, pytest.mark.skipif(lacks, reason=reason)]
    )


@pytest.mark.parametrize(
    "kind", ["for_a_while", pytest.param("to_the_end", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "tracker",
    [
        "Bulky",
        with_library("tensorboard"),
        with_library("mlflow"),
        with_library("mlflow", "mlflow files"),
    ],
)
def test_a_run_whose_tracker_has_a_full_disk_goes_on_and_all_is_told_once_there_is_room(
    tracker: str, kind: str, policy: Path, tmp_path: Path
) -> None:
    made_of("full_disk_program.py", kind, tracker, str(tmp_path), str(policy))


@pytest.mark.parametrize("kind", ["for_a_while", "at_once", "to_the_end"])
@pytest.mark.parametrize("library", [with_library("wandb"), with_library("trackio")])
def test_a_library_that_writes_later_than_it_takes_has_a_full_disk_and_loses_nothing(
    library: str, kind: str, tmp_path: Path
) -> None:
    if library == "wandb":
        needs_timed_writes()
    made_of("full_library_program.py", kind, library, str(tmp_path))


@pytest.mark.parametrize(
    "kind", ["a_moment", pytest.param("until_it_is_killed", marks=pytest.mark.slow), "all_of_it"]
)
def test_a_run_folder_that_is_full(kind: str, tmp_path: Path) -> None:
    """For a moment in which it is kept how far a tracker has come; and for all that a keeper has to
    write.
    """
    made_of("full_folder_program.py", kind, str(tmp_path))
