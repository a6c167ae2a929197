"""Trials: a copy of the tree, one law broken in it, and the word of the test that states the
law.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from .law import ROOT, Law

FOLDERS = ("dataflow", "operators", "graphs", "transport", "bench", "tests", "docs")
FILES = ("pyproject.toml",)
LIMIT_S = 150.0
"""For the tests of one law; they take a few seconds."""
TEST_LIMIT_S = 60
"""For one of them: without what keeps a law, a test may wait for what does not come."""
_MARK = "DATAFLOW_TRIAL"


@dataclass(frozen=True)
class Word:
    """What the tests said."""

    failed: bool
    """Whether a test failed, or what looks on; an error in collecting them, or a run that is late,
    is no such word."""
    said: str
    """The first failure, or what went wrong with the run."""


def copied(folder: Path) -> Path:
    """A copy of the packages and their tests in an empty folder; the working tree is never written
    to.
    """
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    return folder


def tried(law: Law, copy: Path) -> Word:
    """Break one law in the copy, ask its test, and mend it again."""
    path, made = law.broken(copy)
    whole = path.read_text()
    try:
        _write(path, made)
        return asked([law.test_id], copy)
    finally:
        _write(path, whole)


def asked(tests: Sequence[str], copy: Path, limit_s: float = LIMIT_S) -> Word:
    """Run some tests in the copy, in a process of their own that leaves none behind."""
    mark = uuid.uuid4().hex
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "COLUMNS": "500",
        _MARK: mark,
    }
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_timeout",
        "--tb=line",
        f"--timeout={TEST_LIMIT_S}",
    ]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return Word(False, f"nothing within {limit_s:g} s")
    finally:
        _end_all(mark)
    failures = re.findall(r"^(?:FAILED|ERROR) (.*)$", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failures:
        return Word(True, failures[0])
    return Word(
        False,
        "passed"
        if done.returncode == 0
        else f"status {done.returncode}: {(done.stdout + done.stderr)[-500:]}",
    )


def _write(path: Path, text: str) -> None:
    """Write a module; a compiled one of the same second and size would be taken for it."""
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _end_all(mark: str) -> None:
    """Kill what a trial started and did not end: without what keeps a law, nobody else may."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark:
                process.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue
