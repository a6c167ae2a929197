"""What `dataflow live` refuses before it serves anything."""

import asyncio
import os
import socket
from pathlib import Path

import pytest
from starlette.responses import Response

from dataflow.errors import GraphError, RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.live import command
from dataflow.live.command import MOST_RUNS
from dataflow.live.server import PageServer
from dataflow.system.files import RunFolderError


def never(folder: RunFolder, patience_s: float) -> dict[str, object]:
    raise AssertionError("nobody was to be asked")


def test_what_is_no_run_folder_and_too_many_of_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run folder"):
        command.live([tmp_path / "none"], never)
    with pytest.raises(
        GraphError, match=f"shows {MOST_RUNS} runs at most, but {MOST_RUNS + 1} were named"
    ):
        command.live([tmp_path] * (MOST_RUNS + 1), never)


@pytest.mark.parametrize("port", [-1, 70_000, None])
def test_a_port_that_cannot_be_had_is_refused(port: int | None, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wanted = taken.getsockname()[1] if port is None else port
        server = PageServer(lambda address: Response(), "token")
        with pytest.raises(RunError, match=f"port {wanted} of this machine cannot be had"):
            asyncio.run(command._serve(server, wanted, [RunFolder(tmp_path)]))


def test_it_lets_everything_else_on_the_machine_go_first() -> None:
    child = os.fork()
    if not child:
        command.step_back()
        os._exit(0 if os.nice(0) == 19 and os.sched_getscheduler(0) == os.SCHED_IDLE else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
