"""Runs over agents on this machine: they end as on one host, and so they do when a host or the
scheduler dies.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from rigs.machine import alive, descendants, wait_until

from dataflow import verify
from dataflow.agent.rendezvous import KEYS_FILE, Rendezvous
from dataflow.folder.faults import FILE
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.live.looks import Looks
from dataflow.scheduler.requests import ask_for_facts
from dataflow.system.child import ROOT

PROGRAM = Path(__file__).parent / "local_program.py"


PLACE = "generator=h1,trainer=h2"


WAIT_S = 90.0


@dataclass
class Under:
    """A program under way, in a process group of its own as in a terminal."""

    process: subprocess.Popen[str]
    home: Path

    @property
    def folder(self) -> RunFolder:
        return RunFolder.open(self.home / "runs" / "latest")

    def steps(self) -> int:
        with contextlib.suppress(Exception):
            return len(self.folder.read_metrics())
        return 0

    def further(self, steps: int = 3) -> None:
        before = self.steps()

        def is_further() -> bool:
            assert self.process.poll() is None, self.said()
            return self.steps() >= before + steps

        wait_until(is_further, WAIT_S, f"{steps} steps more")

    def said(self) -> str:
        logs = "".join(path.read_text() for path in (self.home / "runs").glob("*/logs/agent-*.log"))
        return (self.home / "output").read_text() + logs

    def agents(self) -> dict[str, int]:
        """By host: the process of its agent."""
        found = {}
        for pid in descendants(self.process.pid):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if "dataflow.agent" in process.cmdline():
                    found[process.environ()["DATAFLOW_AGENT_HOST"]] = pid
        return found

    def faults(self) -> list[dict[str, object]]:
        path = self.folder.path / FILE
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def is_clean(self) -> None:
        verdict = verify(self.folder.path)
        assert verdict.clean, verdict.line
        assert (
            Rendezvous.read(self.folder.path) is None
            and not (self.folder.path / KEYS_FILE).exists()
        )


Start = Callable[..., Under]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the program with some flags, or `dataflow` with some words."""
    started: list[Under] = []
    families: set[int] = set()

    def begin(*flags: str, command: tuple[str, ...] = (str(PROGRAM),), **limits: float) -> Under:
        environment = os.environ | {
            "LIMITS": json.dumps(limits),
            "PYTHONPATH": f"{ROOT}:{tmp_path}",
            "OMP_NUM_THREADS": "1",
        }
        with (tmp_path / "output").open("a") as file:
            process = subprocess.Popen(
                [sys.executable, *command, *flags],
                cwd=tmp_path,
                stdout=file,
                stderr=file,
                env=environment,
                process_group=0,
                text=True,
            )
        started.append(Under(process, tmp_path))
        return started[-1]

    yield begin
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            families |= {each.process.pid, *descendants(each.process.pid)}
    for pid in families:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for each in started:
        each.process.wait(10)


def ask(each: Under, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dataflow", *words, str(each.folder.path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    return done.stdout + done.stderr


@pytest.mark.timeout(180)
def test_a_run_over_local_agents_ends_as_on_one_host_and_leaves_nothing(start: Start) -> None:
    run = start("--on", "local:2", "--place", PLACE, "--quiet")
    family: set[int] = set()

    def has_ended() -> bool:
        family.update(descendants(run.process.pid))
        return run.process.poll() is not None

    wait_until(has_ended, WAIT_S, "the end of the run")
    assert run.process.returncode == 0, run.said()
    run.is_clean()
    assert run.steps() == 8
    placed = {path.stem for path in run.folder.logs.glob("*.log")}
    assert placed >= {"agent-h1", "agent-h2", "generator-0", "trainer-0"}
    assert "forkserver" not in placed
    wait_until(lambda: not alive(family), 10.0, "the end of all processes")


@pytest.mark.parametrize(
    ("bound", "paces"),
    [
        ("generator", ("--generator-s", "0.03", "--trainer-s", "0.06", "--place", PLACE)),
        pytest.param(
            "trainer",
            (
                "--generator-s",
                "0.02",
                "--trainer-s",
                "0.4",
                "--replicas",
                "generator=2",
                "--place",
                "generator=h1+h2,trainer=h2",
            ),
        ),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_doctor_and_page_name_the_node_that_bounds_a_run_over_hosts(
    start: Start, bound: str, paces: tuple[str, ...]
) -> None:
    """A generator of 30 ms a group makes a step's eight in 240 ms, two of 20 ms in 80."""
    run = start("--on", "local:2", "--quiet", "--size", "0", *paces)
    run.further(12)
    page = Looks(run.folder, ask_for_facts)
    wait_until(lambda: page.look()["bottleneck"] == bound, WAIT_S, f"'{bound}' to be named")
    assert f"'{bound}' is the slowest part, busy" in " ".join(ask(run, "doctor").split())
    ask(run, "stop")
    run.process.wait(60)
    run.is_clean()
    assert f"bounded by {bound}" in ask(run, "show")
    assert Looks(run.folder, ask_for_facts).look()["bottleneck"] == bound, "from its folder alone"


@pytest.fixture
def talks(start: Start, policy: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Under]:
    """Starts a run whose episodes are on a host of their own, h1, with others for generator and
    trainer.
    """
    monkeypatch.setenv("POLICY", str(policy))
    place = ("--place", "talk=h1,generator=h2,trainer=h3", "--quiet")
    return lambda *flags: start(
        *place, *flags, command=(str(PROGRAM.with_name("local_episodes.py")),)
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_episodes_take_turns_with_a_generator_on_another_host(talks: Callable[..., Under]) -> None:
    run = talks("--on", "local:3")
    assert run.process.wait(200) == 0, run.said()
    run.is_clean()
    assert run.steps() == 8
    config = json.loads((run.folder.path / "config.json").read_text())
    assert config["hosts"]["talk"] == ["h1"] and config["hosts"]["generator"] == ["h2"]
    turns = [
        row
        for step in range(1, 9)
        for row in run.folder.rollouts_of().read(step).column("turn").to_pylist()
    ]
    assert {max(each) for each in turns} == {2}


def goes_on_without(run: Under, host: str, worker: str) -> None:
    """Kill a host's agent: its worker is missed, and the run goes on to a clean end."""
    os.kill(run.agents()[host], signal.SIGKILL)
    wait_until(
        lambda: any(fault["worker"] == worker for fault in run.faults()),
        30.0,
        "the loss of the host",
    )
    run.further(6)
    ask(run, "stop")
    run.process.wait(60)
    run.is_clean()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("host", ["h1", "h3"])
def test_replicas_of_an_episode_on_two_hosts_go_on_when_one_of_them_or_the_generators_is_lost(
    host: str, start: Start, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLICY", str(policy))
    where = ("--place", "talk=h1+h2,generator=h3,trainer=h4", "--replicas", "talk=2", "--quiet")
    program = str(PROGRAM.with_name("local_episodes.py"))
    run = start(*where, "--on", "local:5", "--size", "0", command=(program,))
    run.further()
    config = json.loads((run.folder.path / "config.json").read_text())
    assert config["hosts"]["talk"] == ["h1", "h2"]
    goes_on_without(run, host, {"h1": "talk-0", "h3": "generator-0"}[host])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("host", ["h1", "h2"])
def test_episodes_go_on_when_their_host_or_that_of_the_generator_is_lost(
    host: str, talks: Callable[..., Under]
) -> None:
    run = talks("--on", "local:4", "--size", "0")
    run.further()
    goes_on_without(run, host, {"h1": "talk-0", "h2": "generator-0"}[host])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_whose_agent_is_killed_is_noticed_at_once_and_the_run_goes_on_elsewhere(
    start: Start,
) -> None:
    run = start("--on", "local:3", "--place", PLACE, "--quiet", "--size", "0", "--seconds", "0.02")
    run.further()
    pid = run.agents()["h1"]
    workers = descendants(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive({pid, *workers}), 10.0, "the end of the workers of the host")
    wait_until(
        lambda: any(fault["worker"] == "generator-0" for fault in run.faults()),
        30.0,
        "the loss of the host",
    )
    run.further(10)
    said = ask(run, "doctor")
    assert "generator-0  h3    ready" in said or "generator-0  h2    ready" in said, said
    assert "ends after the step under way" in ask(run, "stop")
    run.process.wait(60)
    run.is_clean()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_reward_is_swapped_on_its_host_and_goes_on_with_it_to_another_one(
    start: Start, tmp_path: Path
) -> None:
    module = tmp_path / "new_rewards.py"
    module.write_text(
        "from dataflow import scorer\n\n"
        "@scorer(isolate=False)\ndef better(completion: str) -> float:\n    return 100.0\n"
    )
    run = start("--on", "local:3", "--place", PLACE, "--quiet", "--size", "0", "--seconds", "0.02")

    def trains_new() -> bool:
        rewards = run.folder.rollouts_of().read(run.steps()).column("reward").to_pylist()
        return min(rewards) >= 100.0  # type: ignore[no-any-return]

    run.further()
    assert "reward-0     h1    ready" in ask(run, "doctor")
    before = run.agents()
    swap = [sys.executable, "-m", "dataflow", "swap", str(run.folder.path)]
    said = [
        subprocess.run([*swap, wish], capture_output=True, text=True, timeout=60, cwd=ROOT)
        for wish in ("reward=nowhere_at_all:better", "reward=new_rewards:better")
    ]
    assert [each.returncode for each in said] == [2, 0], [
        each.stdout + each.stderr for each in said
    ]
    assert "is not found where the run's program looks" in " ".join(said[0].stderr.split())
    wait_until(trains_new, WAIT_S, "a step of the new reward")
    assert run.faults() == [] and run.agents() == before
    module.unlink()
    os.kill(before["h1"], signal.SIGKILL)
    wait_until(
        lambda: any(fault["worker"] == "reward-0" for fault in run.faults()),
        30.0,
        "the loss of the host",
    )
    run.further(20)
    assert trains_new()
    ask(run, "stop")
    run.process.wait(60)
    run.is_clean()
    assert "note: swapped: reward = new_rewards:better" in str(verify(run.folder.path))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_whose_agent_stands_still_is_lost_and_ends_what_it_has_when_it_is_back(
    start: Start,
) -> None:
    run = start("--on", "local:3", "--place", PLACE, "--size", "0", "--seconds", "0.02", hang_s=4.0)
    run.further()
    pid = run.agents()["h1"]
    (forkserver,) = psutil.Process(pid).children()
    workers = {child.pid for child in forkserver.children()}
    os.kill(pid, signal.SIGSTOP)
    wait_until(
        lambda: any(fault["worker"] == "generator-0" for fault in run.faults()),
        30.0,
        "the loss of the host",
    )
    run.further(5)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not alive(workers), 20.0, "the end of those that were left")
    wait_until(lambda: "host 'h1' is back" in run.said(), 20.0, "the host")
    assert set(alive({pid, forkserver.pid})) == {pid, forkserver.pid}
    run.further(5)
    ask(run, "stop")
    run.process.wait(60)
    run.is_clean()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_scheduler_that_is_killed_is_followed_by_another_that_takes_the_workers_as_they_are(
    start: Start,
) -> None:
    first = start(
        "--on",
        "local:2",
        "--place",
        PLACE,
        "--quiet",
        "--size",
        "0",
        "--seconds",
        "0.02",
        "--steps",
        "400",
        hang_s=3.0,
    )
    first.further()
    family = {pid for agent in first.agents().values() for pid in (agent, *descendants(agent))}
    first.process.kill()
    first.process.wait(10)
    assert "has died; dataflow resume takes over the workers" in ask(first, "stop")
    second = start("resume", str(first.folder.path), command=("-m", "dataflow"), hang_s=3.0)
    wait_until(
        lambda: [fault["worker"] for fault in second.faults()] == ["scheduler"],
        WAIT_S,
        "the second scheduler",
    )
    assert set(alive(family)) == family
    second.process.wait(120)
    assert second.process.returncode == 0, second.said()
    second.is_clean()
    assert second.steps() == 400
    with contextlib.closing(Ledger.open(second.folder.ledger)) as ledger:
        assert ledger.counts("trainer").trained == 400 * 8
    wait_until(lambda: not alive(family), 10.0, "the end of all processes")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_agents_that_no_scheduler_comes_to_end_with_their_workers(start: Start) -> None:
    run = start(
        "--on",
        "local:2",
        "--place",
        PLACE,
        "--quiet",
        "--size",
        "0",
        "--seconds",
        "0.02",
        adopt_s=3.0,
        drain_s=5.0,
    )
    run.further()
    family = descendants(run.process.pid)
    run.process.kill()
    wait_until(lambda: not alive(set(family)), 40.0, "the end of agents and workers")
    assert verify(run.folder.path).clean


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_control_c_reaches_the_scheduler_alone_and_ends_the_run_in_order(start: Start) -> None:
    run = start("--on", "local:2", "--place", PLACE, "--size", "0", "--seconds", "0.02")
    run.further()
    os.killpg(run.process.pid, signal.SIGINT)
    run.process.wait(60)
    assert run.process.returncode == 0, run.said()
    run.is_clean()
    assert run.folder.read_json("times.json")["outcome"] == "stopped"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigterm_to_all_processes_on_all_hosts_ends_the_run_in_order(start: Start) -> None:
    run = start("--on", "local:2", "--place", PLACE, "--size", "0", "--seconds", "0.02")
    run.further()
    for pid in (run.process.pid, *descendants(run.process.pid)):
        os.kill(pid, signal.SIGTERM)
    assert run.process.wait(60) == 0, run.said()
    run.is_clean()
    assert run.folder.read_json("times.json")["outcome"] == "stopped" and run.faults() == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_whose_agent_alone_gets_sigterm_leaves_after_a_checkpoint_and_the_run_goes_on(
    start: Start,
) -> None:
    run = start("--on", "local:2", "--place", PLACE, "--size", "0", "--seconds", "0.02")
    run.further()
    agent = run.agents()["h2"]
    os.kill(agent, signal.SIGTERM)
    wait_until(lambda: not alive({agent}), 20.0, "the agent's end")
    assert (
        "host 'h2' was asked to end, and leaves; trainers write a checkpoint before" in run.said()
    )
    run.further()
    os.kill(run.process.pid, signal.SIGINT)
    assert run.process.wait(60) == 0, run.said()
    run.is_clean()
    assert {fault["cause"] for fault in run.faults()} == {
        "was on host 'h2', which has ended its agent"
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_control_z_stops_the_workers_of_all_hosts_and_sigcont_lets_them_go_on(start: Start) -> None:
    run = start(
        "--on",
        "local:2",
        "--place",
        PLACE,
        "--quiet",
        "--size",
        "0",
        "--seconds",
        "0.02",
        hang_s=3.0,
    )
    run.further()
    os.killpg(run.process.pid, signal.SIGTSTP)
    wait_until(
        lambda: psutil.Process(run.process.pid).status() == psutil.STATUS_STOPPED, 20.0, "the stop"
    )
    before = run.steps()
    time.sleep(8.0)  # longer than anybody's patience
    assert run.steps() <= before + 1
    os.killpg(run.process.pid, signal.SIGCONT)
    run.further(5)
    assert run.faults() == []
    os.killpg(run.process.pid, signal.SIGINT)
    run.process.wait(60)
    run.is_clean()


def on_hosts_only(tmp_path: Path, what: str) -> str:
    """A program that does something else on a host, before it builds its graph."""
    flawed = tmp_path / "flawed.py"
    flawed.write_text(
        "import sys, time\nif 'dataflow.agent.program' in sys.orig_argv:"
        f" {what}\nexec(open({str(PROGRAM)!r}).read(), {{'__file__': {str(PROGRAM)!r}, '__name__':"
        " '__main__'})\n"
    )
    return str(flawed)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "raise ValueError('no such data here')",
            "host 'h1': python .* did not get to its run: ValueError: no such data",
        ),
        ("sys.exit(0)", "did not get to its run: SystemExit: 0"),
        ("time.sleep(600)", r"waited 8 s for hosts \['h1'\] to build the graph"),
    ],
)
def test_a_program_that_is_not_built_on_a_host_ends_the_run_with_its_reason(
    what: str, said: str, start: Start, tmp_path: Path
) -> None:
    run = start("--on", "local:1", "--quiet", command=(on_hosts_only(tmp_path, what),), start_s=8.0)
    family: set[int] = set()
    wait_until(
        lambda: family.update(descendants(run.process.pid)) or len(family) > 2, WAIT_S, "the agent"
    )
    assert run.process.wait(60) == 1
    assert re.search(said, run.said()), run.said()
    wait_until(lambda: not alive(family), 10.0, "the end of all processes")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_plan_that_is_refused_ends_the_agents_and_leaves_no_folder(
    start: Start, tmp_path: Path
) -> None:
    run = start("--on", "local:1", "--quiet", "--place", "generator=h7")
    family: set[int] = set()
    wait_until(
        lambda: family.update(descendants(run.process.pid)) or len(family) > 1, WAIT_S, "the agent"
    )
    assert run.process.wait(60) == 1
    assert "h7" in run.said() and "GraphError" in run.said()
    assert not [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    wait_until(lambda: not alive(family), 10.0, "the end of the agent")
