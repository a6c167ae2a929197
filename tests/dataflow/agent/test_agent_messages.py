"""What travels between a scheduler and its agents, and what an agent finds in its environment."""

import os
from pathlib import Path

import pytest

from dataflow.agent.environment import AgentEnvironment
from dataflow.agent.messages import FROM_AGENT, TO_AGENT, Begin, Built, Join, Spawn
from dataflow.errors import RunError
from dataflow.planning.hosts import Host
from dataflow.system.messages import MessageError
from dataflow.system.security import KEYS_BYTES, RunKeys


def test_messages_of_agents_come_as_they_went() -> None:
    join = Join(
        host=Host(name="h1", cpus=2),
        address="10.0.0.1",
        sockets="/dev/shm/x",
        folder="/runs/a",
        pid=7,
    )
    assert FROM_AGENT.decode(FROM_AGENT.encode(join)) == join
    assert FROM_AGENT.decode(FROM_AGENT.encode(Built(digest="ab", files={"a.py": "cd"}))) == Built(
        digest="ab", files={"a.py": "cd"}
    )
    begin = Begin(
        launch={"module": "graphs.sorting"},
        inputs={"steps": None, "scale": [[1, {"a": 2}]]},
        whereabouts={},
    )
    assert TO_AGENT.decode(TO_AGENT.encode(begin)) == begin
    spawn = Spawn("trainer-0", {"host": "h1"}, heavy=True, keeps=True)
    assert TO_AGENT.decode(TO_AGENT.encode(spawn)) == spawn
    with pytest.raises(MessageError, match="another protocol"):
        FROM_AGENT.decode(TO_AGENT.encode(spawn))


def test_an_agent_finds_what_its_launcher_said(tmp_path: Path) -> None:
    keys, file = RunKeys.make(), tmp_path / "keys"
    file.write_bytes(keys.to_bytes())
    file.chmod(0o600)
    told = AgentEnvironment(
        scheduler="tcp://10.0.0.1:5", keys=str(file), folder="/runs/a", host="h1"
    )
    found = AgentEnvironment.take(told.to_environ())
    assert found == told
    assert found.read_keys() == keys
    inlet, outlet = os.pipe()
    os.write(outlet, keys.to_bytes())
    os.close(outlet)
    piped = AgentEnvironment(scheduler="tcp://10.0.0.1:5", keys=f"fd:{inlet}", folder="/runs/a")
    assert piped.read_keys() == keys


def test_what_an_agent_is_not_told_is_named() -> None:
    with pytest.raises(RunError, match=r"DATAFLOW_AGENT_KEYS and DATAFLOW_AGENT_FOLDER is not set"):
        AgentEnvironment.take({"DATAFLOW_AGENT_SCHEDULER": "tcp://10.0.0.1:5"})


def test_keys_that_others_could_read_or_that_are_none_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(RunKeys.make().to_bytes())
    told = AgentEnvironment(scheduler="tcp://10.0.0.1:5", keys=str(file), folder="/runs/a")
    file.chmod(0o644)
    with pytest.raises(RunError, match="mode 0644"):
        told.read_keys()
    file.write_bytes(b"x" * (KEYS_BYTES - 1))
    file.chmod(0o600)
    with pytest.raises(RunError, match=f"{KEYS_BYTES} bytes, but there are {KEYS_BYTES - 1}"):
        told.read_keys()
    file.unlink()
    with pytest.raises(RunError, match="No such file"):
        told.read_keys()
