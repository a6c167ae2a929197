"""The launcher of agents on this machine: what it starts, and what it says of them."""

from dataclasses import replace
from pathlib import Path

import pytest
from rigs.machine import wait_until

from dataflow import GraphError
from dataflow.history.launch import Launch
from dataflow.launchers.launcher import Joining, Launcher
from dataflow.launchers.local import Local, Slot
from dataflow.launchers.named import known_hosts, launcher_named
from dataflow.system.security import RunKeys


@pytest.fixture
def join(tmp_path: Path) -> Joining:
    (tmp_path / "logs").mkdir()
    return Joining(
        address="tcp://127.0.0.1:1",
        keys=RunKeys.make().to_bytes(),
        keys_file="",
        folder=str(tmp_path),
        launch=Launch(module="no.program", folder=str(tmp_path)),
    )


def test_hosts_share_the_machine_and_have_names() -> None:
    launcher = launcher_named("local:3")
    assert isinstance(launcher, Local) and isinstance(launcher, Launcher) and launcher.hosts == 3
    assert [host.name for host in known_hosts(launcher)] == ["h1", "h2", "h3"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("local", r"write it as --on local:3"),
        ("local:x", "got 'x'"),
        ("locl:2", r"did you mean 'local'\?"),
        ("local:0", "give a number above 0"),
    ],
)
def test_what_is_no_launcher_is_refused(text: str, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        launcher_named(text)


def test_an_agent_that_ends_is_told_once_with_its_last_words(join: Joining) -> None:
    launcher = Local(
        [
            Slot(host="a", prefix=("sh", "-c", "echo out of luck; exit 3")),
            Slot(host="b", prefix=("sh", "-c", "exec sleep 60")),
        ]
    )
    launcher.start(join)
    told: list[str] = []
    try:
        wait_until(lambda: bool(told.extend(launcher.ended()) or told), 20.0, "the end of an agent")
        assert told == ["the agent of host 'a' ended with status 3: out of luck"]
        assert launcher.ended() == []
    finally:
        launcher.stop()
    assert launcher.ended() == ["the agent of host 'b' ended by signal 15: it said nothing"]
    launcher.stop()


def test_the_keys_stand_on_no_command_line_and_in_no_environment(join: Joining) -> None:
    told = replace(join.agent(host="a"), keys="fd:3").to_environ()
    assert not any(join.keys.decode() in value for value in told.values())
    assert told["DATAFLOW_AGENT_KEYS"] == "fd:3"
    assert join.keys.decode() not in repr(join)
