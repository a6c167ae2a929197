"""What `--on` names, and what it refuses before anything starts."""

import dataclasses
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rigs.launchers.joining import JOIN

from dataflow.errors import GraphError, RunError
from dataflow.launchers.launcher import Launcher
from dataflow.launchers.local import local
from dataflow.launchers.named import LAUNCHERS, OnRay, Slurm, launcher_named, ray
from dataflow.launchers.torchrun import Torchrun

RANK_0 = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_every_name_stands_for_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANK_0.items():
        monkeypatch.setenv(name, value)
    found = {
        name: type(launcher_named(f"{name}:2" if name == "local" else name)) for name in LAUNCHERS
    }
    assert found == {"local": type(local(1)), "ray": OnRay, "slurm": Slurm, "torchrun": Torchrun}
    ranked = launcher_named("torchrun")
    assert isinstance(ranked, Launcher) and (ranked.hosts, ranked.listen) == (2, "127.0.0.1")
    assert launcher_named("ray:4") == ray(hosts=4)


def test_the_first_rank_has_what_the_environment_says_of_its_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = str(trial.getsockname()[1] - 1)
    own = {"DATAFLOW_AGENT_CPUS": "3", "DATAFLOW_AGENT_GPUS": "0", "DATAFLOW_AGENT_HOST": "first"}
    for name, value in {**RANK_0, **own, "MASTER_PORT": port, "DATAFLOW_SECRET": "s" * 32}.items():
        monkeypatch.setenv(name, value)
    told: list[dict[str, str]] = []
    ended = SimpleNamespace(poll=lambda: 0, end=lambda within_s: 0)
    monkeypatch.setattr(
        "dataflow.agent.environment.program",
        lambda *_, environment, **__: told.append(environment) or ended,
    )
    ranked = Torchrun()
    ranked.start(dataclasses.replace(JOIN, folder=str(tmp_path)))
    ranked.stop()
    assert {name: told[0][name] for name in own} == own


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ("slurm:4", "takes all hosts"),
        ("torchrun:4", "takes all hosts"),
        ("ray:all", "how many hosts"),
        ("ray:0", "at least 1 host"),
        ("rai", "did you mean 'ray'"),
    ],
)
def test_a_wish_that_cannot_be_read_is_refused(wish: str, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        launcher_named(wish)


def test_a_later_rank_of_a_host_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**RANK_0, "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        launcher_named("torchrun")
    assert ended.value.code == 0


def test_slurm_outside_of_a_job_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(GraphError, match="SLURM_JOB_NODELIST is not set"):
        _ = Slurm().hosts


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "nowhere.invalid"])
def test_the_first_host_of_a_slurm_job_listens_at_an_address_whatever_slurm_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    fake = tmp_path / "scontrol"
    node = f'echo "NodeName=$4 NodeAddr={address} X=1"'
    fake.write_text(f'#!/bin/sh\nif [ "$2" = hostnames ]; then echo n1; echo n2; else {node}; fi\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    found = Slurm()
    assert found.hosts == 2
    if address == "nowhere.invalid":
        with pytest.raises(GraphError, match="Slurm's NodeAddr of n1 is 'nowhere.invalid'"):
            _ = found.listen
    else:
        assert found.listen in ("127.0.0.1", "::1")


def test_slurm_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RunError, match="does not say which hosts the job has: scontrol"):
        _ = Slurm().hosts


@pytest.mark.parametrize(
    ("step", "ends"),
    [("sleep 0.2; touch ended", True), ("touch ended", True), ("exec sleep 60", False)],
)
def test_the_step_of_a_slurm_job_may_end_by_itself_before_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, ends: bool
) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/sh\n{step}\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("dataflow.launchers.named._STOP_S", 5.0 if ends else 0.2)
    found = Slurm()
    vars(found)["_names"] = ["n1"]
    found.start(JOIN)
    found.stop()
    found.stop()
    assert (tmp_path / "ended").exists() is ends
    assert found.ended() == []


def test_a_step_that_ends_early_is_told_with_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = Slurm()
    vars(found)["_names"] = ["n1"]
    found.start(JOIN)
    deadline = time.monotonic() + 20
    while not (said := found.ended()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "srun ended with status 3, and all agents with it" in said[0]
    assert found.ended() == []


def test_a_program_that_lies_elsewhere_on_rays_hosts_is_refused() -> None:
    with pytest.raises(GraphError, match="ray job submit --working-dir"):
        ray(runtime_env={"working_dir": "."})
