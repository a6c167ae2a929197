"""The wheel: all that a run needs, in an environment that knows nothing of the clone."""

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from rigs.launchers import wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel.build(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_its_packages(built: Path) -> None:
    packages = [name for name in wheel.SOURCES if (wheel.ROOT / name).is_dir()]
    files = (path for name in packages for path in (wheel.ROOT / name).rglob("*") if path.is_file())
    wanted = {
        str(path.relative_to(wheel.ROOT)) for path in files if path.suffix not in (".pyc", ".md")
    }
    assert wanted <= set(zipfile.ZipFile(built).namelist())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_runs_from_the_wheel_alone(built: Path, tmp_path: Path) -> None:
    """With what the wheel declares and no more, from a folder that is no clone, and with its
    kernels.
    """
    python = wheel.environment(tmp_path / "environment", built)
    alone = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    alone["OMP_NUM_THREADS"] = "1"

    def say(*arguments: str) -> str:
        done = subprocess.run(
            [str(python), *arguments],
            cwd=tmp_path,
            env=alone,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    say("-m", "graphs.sorting", "--steps", "2", "--quiet")
    assert (
        json.loads((tmp_path / "runs" / "latest" / "metrics.jsonl").read_text().splitlines()[-1])[
            "step"
        ]
        == 2
    )
    assert "issued" in say("-m", "dataflow", "verify", "runs/latest")
    kernels = (
        "from operators.engine.native import build; print(build.library() is not None,"
        " build.__file__)"
    )
    with_compiler = any(map(shutil.which, ("cc", "gcc", "clang")))
    assert say("-c", kernels).startswith(f"{with_compiler} {tmp_path}")
