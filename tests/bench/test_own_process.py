"""Laws of runs that have a process each: figures or the reason, and nothing is left when the bench
is ended.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.own_process import figures_of

ROOT = Path(__file__).parent.parent.parent
CHILD = """
import json, os, pathlib, sys, time
_, flag, what, out, *flags = sys.argv
pathlib.Path(flags[0]).write_text(str(os.getpid()))
if what == "sleep":
    time.sleep(600)
if what == "fail":
    sys.exit("no model")
if what == "figures":
    pathlib.Path(out).write_text(json.dumps({"flag": flag}))
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """The name of a module that is a child; it writes its process id into tmp_path / "pid"."""
    (tmp_path / "child_of_a_bench.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    return "child_of_a_bench"


def test_a_child_gives_its_figures_or_the_reason_why_there_are_none(child, tmp_path):
    flags = [str(tmp_path / "pid")]
    assert figures_of(child, ["figures"], flags, timeout_s=60) == {"flag": "--child"}
    assert "exit status 1: no model" in figures_of(child, ["fail"], flags, timeout_s=60)["failed"]
    assert "ended without figures" in figures_of(child, ["nothing"], flags, timeout_s=60)["failed"]
    looks = []
    found = figures_of(child, ["sleep"], flags, timeout_s=1.0, watch=looks.append)
    assert "did not end" in found["failed"] and looks and not psutil.pid_exists(looks[0])


def test_a_bench_that_is_told_to_end_leaves_no_child(child, tmp_path):
    pid = tmp_path / "pid"
    program = (
        f"from bench.own_process import figures_of; figures_of({child!r}, ['sleep'],"
        f" [{str(pid)!r}], timeout_s=99)"
    )
    bench = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        while not (pid.is_file() and pid.read_text()):
            assert bench.poll() is None
            time.sleep(0.05)
        bench.terminate()
        assert bench.wait(60) == 128 + signal.SIGTERM
        assert not psutil.pid_exists(int(pid.read_text()))
    finally:
        bench.kill()
