"""One command, started once per host with RANK and WORLD_SIZE: one run, on two addresses of
loopback.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rigs.launchers import launched

from dataflow.history.verify import verify

pytestmark = pytest.mark.slow


def test_each_rank_runs_the_same_command_and_all_are_one_run(tmp_path: Path) -> None:
    """Two on each of two hosts: of those that do not lead, one becomes the agent of its host, and
    others end.
    """
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1] - 1
    common = {
        **os.environ,
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DATAFLOW_SECRET": secrets.token_hex(32),
        "OMP_NUM_THREADS": "1",
    }
    ranks = []
    for rank in (3, 2, 1, 0):
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "DATAFLOW_AGENT_HOST": f"host{rank // 2}",
            "DATAFLOW_AGENT_ADDRESS": f"127.0.0.{rank // 2 + 1}",
        }
        command = [sys.executable, launched.__file__, "--steps", "5", "--quiet", "--on", "torchrun"]
        with (tmp_path / f"rank-{rank}.log").open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    command, cwd=tmp_path, env={**common, **own}, stdout=log, stderr=log
                )
            )
    try:
        for each in ranks:
            each.wait(110)
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    said = {each.name: each.read_text() for each in tmp_path.glob("*.log")}
    assert [each.returncode for each in ranks] == [0, 0, 0, 0], said
    run = tmp_path / "runs" / "latest"
    assert (
        verify(run).clean
        and json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 5
    )
    assert {each.name for each in (run / "logs").glob("agent-*.log")} == {
        "agent-host0.log",
        "agent-host1.log",
    }
    assert not list(run.glob("agents.*"))
    assert common["DATAFLOW_SECRET"] not in (run / "config.json").read_text()
