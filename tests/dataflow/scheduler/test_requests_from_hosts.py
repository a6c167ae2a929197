"""Requests to a run that is led from another host: who can read the run's keys is heard, and nobody else."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataflow.agent.rendezvous import KEYS_FILE
from dataflow.errors import DeadlineError, RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.socket_folder import CONTROL
from dataflow.scheduler.agents import Agents
from dataflow.scheduler.control_server import HostsControlServer
from dataflow.scheduler.requests import Stopping, StopRun, ask_to_stop
from dataflow.system.security import RunKeys


@pytest.fixture
def led(tmp_path: Path) -> Iterator[RunFolder]:
    """The folder of a run whose scheduler takes requests, as another host sees it."""
    agents = Agents("127.0.0.1", RunKeys.make(), tmp_path)
    agents.announce()
    server = HostsControlServer(agents, tmp_path)
    folder = RunFolder(tmp_path)
    folder.write_json(CONTROL, {"address": "ipc:///dev/shm/dataflow-nowhere/commands", "remote": server.remote})
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            for client, request in server.wait(0.05)[1]:
                assert request == StopRun()
                server.reply(client, Stopping())

    serving = threading.Thread(target=serve)
    serving.start()
    yield folder
    over.set()
    serving.join()
    server.close()


def test_who_can_read_the_keys_in_the_run_folder_is_heard_from_another_host(led: RunFolder) -> None:
    assert (led.path / KEYS_FILE).stat().st_mode & 0o777 == 0o600
    ask_to_stop(led, timeout_s=10.0)


def test_who_has_other_keys_is_not_heard_and_who_has_none_is_told(led: RunFolder) -> None:
    (led.path / KEYS_FILE).write_bytes(RunKeys.make().to_bytes())
    with pytest.raises(DeadlineError, match="has not answered"):
        ask_to_stop(led, timeout_s=0.5)
    (led.path / KEYS_FILE).unlink()
    with pytest.raises(RunError, match="led from another host, at tcp://127.0.0.1:.*ask as the user that started it"):
        ask_to_stop(led, timeout_s=0.5)
