"""A run over hosts of the rig: the scheduler on the first, an agent on each."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflow.folder.faults import read_faults
from dataflow.folder.run_folder import RunFolder
from dataflow.history.verify import Verdict, verify

from ..machine import wait_until
from .by_hand import told
from .host import Command, Host

PROGRAM = Path(__file__).parent / "program.py"
START_S = 120.0


@dataclass
class Cluster:
    """One run; ends with its hosts."""

    hosts: Sequence[Host]
    folder: Path
    """Shared by all, or at this path on each, where none sees another's."""
    apart: Path | None = None
    """Where it is not shared: a folder of this machine, for what processes print."""
    program: Path = PROGRAM
    scheduler: Command | None = None
    agents: dict[str, Command] = field(default_factory=dict)
    leads: Host | None = None
    """The scheduler's."""

    def launch(
        self,
        graph: str,
        knobs: Mapping[str, Any] | None = None,
        *,
        limits: Mapping[str, float] | None = None,
        listen: str = "",
        on: Host | None = None,
        **run: Any,
    ) -> None:
        """Start the scheduler alone. listen: where it hears agents; on: its host, or the first;
        run: of `run`.
        """
        first = on or self.hosts[0]
        self.leads = first
        if self.apart:
            first.outside(self.folder).mkdir(parents=True, exist_ok=True)
        given = {
            "graph": graph,
            "knobs": knobs or {},
            "hosts": len(self.hosts),
            "listen": listen or first.address,
            "folder": str(self.folder),
            "limits": limits or {},
            "run": run,
        }
        self.scheduler = self.spawn(
            first, [sys.executable, self.program, json.dumps(given)], "scheduler"
        )

    def start(
        self,
        graph: str,
        *knobs: Mapping[str, Any],
        agents: Sequence[Host] | None = None,
        **how: Any,
    ) -> None:
        """The same, and the agents of `agents`, or of all hosts."""
        self.launch(graph, *knobs, **how)
        wait_until(self.joining, START_S, "what agents have to know")
        for host in self.hosts if agents is None else agents:
            self.join(host)

    def join(self, host: Host, env: Mapping[str, str] | None = None) -> Command:
        """Start the agent of a host."""
        own = {
            f"DATAFLOW_AGENT_{name}": value
            for name, value in (("HOST", host.name), ("ADDRESS", host.address))
        }
        environment = {**(self.joining() or {}), **own, "DATAFLOW_AGENT_CPUS": "1"}
        if self.apart and host is not self.leads:
            keys = host.outside("/tmp/agents.keys")
            keys.touch(0o600)
            keys.write_bytes(self._here(environment["DATAFLOW_AGENT_KEYS"]).read_bytes())
            environment["DATAFLOW_AGENT_KEYS"] = "/tmp/agents.keys"
        environment |= env or {}
        command = [sys.executable, "-m", "dataflow.agent"]
        self.agents[host.name] = self.spawn(host, command, f"agent-{host.name}", environment)
        return self.agents[host.name]

    def spawn(
        self,
        host: Host,
        command: Sequence[str | Path],
        name: str,
        env: Mapping[str, str] | None = None,
    ) -> Command:
        """A process whose output is a file of the shared folder, or of this machine."""
        with ((self.apart or self.folder) / f"{name}.out").open("a") as out:
            return host.popen(command, env, stdout=out, stderr=subprocess.STDOUT)

    def joining(self) -> dict[str, Any] | None:
        self.check_alive()
        return told(self._here(self.folder))

    def check_alive(self) -> None:
        assert self.scheduler and self.scheduler.poll() is None, (
            f"the scheduler has ended: {self.said()}"
        )

    def said(self, name: str = "scheduler") -> str:
        path = (self.apart or self.folder) / f"{name}.out"
        return path.read_text() if path.exists() else ""

    def said_by_agent(self, host: Host) -> str:
        """On its terminal, and in its log."""
        folder = host.outside(self.folder) if self.apart else self.folder
        logs = folder.glob(f"runs/*/logs/agent-{host.name}.log")
        return self.said(f"agent-{host.name}") + "".join(
            log.read_text() for log in logs if not log.parents[1].is_symlink()
        )

    def kill(self) -> None:
        """Whatever runs of it."""
        for command in (self.scheduler, *self.agents.values()):
            if command is not None:
                command.kill()
                command.wait(10)

    @property
    def run_folder(self) -> Path:
        """As this machine finds the scheduler's."""
        runs = self._here(self.folder / "runs")
        return runs / (runs / "latest").readlink()

    def steps(self) -> int:
        """That the run has made."""
        if not self._here(self.folder / "runs/latest").exists():
            return 0
        return sum("loss" in line for line in RunFolder(self.run_folder).read_metrics())

    def wait_for_step(self, step: int, deadline_s: float = 200.0) -> None:
        def made() -> bool:
            self.check_alive()
            return self.steps() >= step

        wait_until(made, deadline_s, f"step {step}")

    def faults(self) -> list[dict[str, Any]]:
        return read_faults(self.run_folder)

    def ended(self, deadline_s: float = 200.0) -> Verdict:
        """What `verify` says of the run once all its processes have ended. AssertionError where one
        failed.
        """
        assert self.scheduler
        status = self.scheduler.wait(deadline_s)
        assert status == 0, self.said()
        for name, agent in self.agents.items():
            host = next(host for host in self.hosts if host.name == name)
            assert agent.wait(30) == 0, self.said_by_agent(host)
        return verify(self.run_folder)

    def _here(self, path: Path | str) -> Path:
        """Where this machine finds a file of the scheduler's host."""
        return self.leads.outside(path) if self.apart and self.leads else Path(path)
