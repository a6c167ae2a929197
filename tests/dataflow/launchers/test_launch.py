"""`dataflow launch`: scripts that begin a run and go on with it, and what is refused before
anything is submitted.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from dataflow.errors import GraphError, RunError
from dataflow.launchers.submit import Job, batch_script, launch, name_of

COMMAND = ("python", "-m", "graphs.aipo", "--steps", "100")


def job(**more: object) -> Job:
    return Job(
        **{"command": COMMAND, "name": "aipo", "hosts": 4, "runs": "/shared/my runs", **more}
    )  # type: ignore[arg-type]


def options(script: str) -> dict[str, str]:
    lines = [
        line.removeprefix("#SBATCH --")
        for line in script.splitlines()
        if line.startswith("#SBATCH --")
    ]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_a_job_asks_for_whole_hosts_is_requeued_and_takes_more_options_over() -> None:
    found = options(batch_script(job(gpus=8), "/home/me", {"time": "02:00:00", "job-name": "mine"}))
    assert (
        found["nodes"] == "4" and found["ntasks-per-node"] == "1" and found["gpus-per-node"] == "8"
    )
    assert (
        {"exclusive", "requeue"} <= found.keys()
        and found["time"] == "02:00:00"
        and found["job-name"] == "mine"
    )
    assert found["output"] == "'/shared/my runs/slurm-%j.log'"
    assert options(batch_script(job(cpus=4), "/"))["cpus-per-task"] == "4"


@pytest.mark.parametrize("attempt", ["", "1"])
def test_each_attempt_has_a_log_and_a_later_one_resumes_the_run(
    tmp_path: Path, attempt: str
) -> None:
    runs = tmp_path / "my runs"
    mine = runs / "slurm-7"
    script = batch_script(job(command=["echo", "it's begun"], runs=str(runs)), str(tmp_path))
    script = script.replace(f"exec {sys.executable}", "exec echo")
    if attempt:
        (mine / "latest").mkdir(parents=True)
        (mine / "latest" / "ledger.db").touch()
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"} | (
        {"SLURM_RESTART_COUNT": attempt} if attempt else {}
    )
    subprocess.run(["sh"], input=script, env=environment, text=True, timeout=30, check=True)
    said = (mine / "logs" / f"attempt-{attempt or 0}.log").read_text()
    anew = f"it's begun --on slurm --runs {mine}\n"
    assert said == (f"-m dataflow resume {mine}/latest\n" if attempt else anew)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"command": []}, "none is given"),
        ({"command": [*COMMAND, "--on", "ray"]}, "its command has --on"),
        ({"command": [*COMMAND, "--runs=here"]}, "its command has --runs"),
        ({"name": "my job"}, "a job's name is made of"),
        ({"hosts": 0}, "at least 1 hosts"),
        ({"cpus": 0}, "at least 1 cores"),
    ],
)
def test_a_job_that_cannot_be_is_refused(more: dict[str, object], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        job(**more)


def test_an_option_that_sbatch_would_not_read_as_one_is_refused() -> None:
    with pytest.raises(GraphError, match="long name and a value"):
        batch_script(job(), "/", {"x y": "1"})
    with pytest.raises(GraphError, match="long name and a value"):
        batch_script(job(), "/", {"comment": "a\n#SBATCH --uid=0"})


def test_a_launch_is_for_one_cluster() -> None:
    for slurm, kubernetes in ((False, None), (True, "jobset")):
        with pytest.raises(GraphError, match="for one cluster"):
            launch(COMMAND, slurm=slurm, kubernetes=kubernetes)  # type: ignore[arg-type]


def test_a_machine_without_sbatch_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="not on this machine's PATH"):
        launch(COMMAND, slurm=True, runs=tmp_path / "runs")


@pytest.mark.parametrize("refuses", [False, True])
def test_a_job_is_handed_to_sbatch_and_its_refusal_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refuses: bool,
) -> None:
    fake = tmp_path / "sbatch"
    fake.write_text(
        "#!/bin/sh\n"
        + (
            "echo no such partition >&2; exit 1\n"
            if refuses
            else f"cat >{tmp_path}/took; echo '7;c'\n"
        )
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if refuses:
        with pytest.raises(RunError, match="does not take the job: no such partition"):
            launch(COMMAND, slurm=True, runs=tmp_path / "runs")
        return
    assert launch(COMMAND, slurm=True, runs=tmp_path / "runs") == 0
    assert "job 7" in capsys.readouterr().out
    launch(COMMAND, slurm=True, runs=tmp_path / "runs", dry_run=True)
    assert (tmp_path / "took").read_text() == capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (COMMAND, "aipo"),
        (["python", "my/first_run.py", "--x", "1"], "first-run"),
        (["torchrun", "-m", "pkg.Deep_One"], "deep-one"),
        (["./program"], "dataflow"),
    ],
)
def test_a_job_is_called_after_its_program(command: list[str], name: str) -> None:
    assert name_of(command) == name
