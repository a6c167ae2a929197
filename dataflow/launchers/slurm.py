"""The launcher within a Slurm job: one agent on each of its hosts, all of them one step, started by
srun."""

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dataflow.errors import GraphError, RunError
from dataflow.launchers.launcher import Joining
from dataflow.system.addresses import resolved
from dataflow.system.child import end, ended_within
from dataflow.system.files import tail

_ASK_S = 30.0
_STOP_S = 5.0
_AGENT = (
    'DATAFLOW_AGENT_HOST="$SLURMD_NODENAME" DATAFLOW_AGENT_CPUS="$SLURM_CPUS_ON_NODE" '
    'DATAFLOW_AGENT_GPUS="${SLURM_GPUS_ON_NODE:-}" exec "$0" -m dataflow.agent'
)
"""What a task of the step runs, as Slurm tells each host its own."""


class Slurm:
    """The hosts of the job that this process is a part of; in a batch script, or in salloc on one
    of them."""

    def __init__(self) -> None:
        self._step: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None

    @functools.cached_property
    def _names(self) -> Sequence[str]:
        """Of its hosts. Errors: GraphError outside of a job, RunError where Slurm does not
        answer."""
        nodes = os.environ.get("SLURM_JOB_NODELIST")
        if not nodes:
            raise GraphError(
                "--on slurm is for a program within a Slurm job, but SLURM_JOB_NODELIST is not set;"
                " have dataflow launch --slurm submit it, or start it below salloc"
            )
        return _asked("scontrol", "show", "hostnames", nodes).split()

    @property
    def hosts(self) -> int:
        """All of the job."""
        return len(self._names)

    @functools.cached_property
    def listen(self) -> str:
        """The first host's, as Slurm itself reaches it; the batch script runs there."""
        first = _asked("scontrol", "--oneliner", "show", "node", self._names[0])
        facts = dict(part.partition("=")[::2] for part in first.split())
        return resolved(
            facts.get("NodeAddr", self._names[0]), f"Slurm's NodeAddr of {self._names[0]}"
        )

    def start(self, join: Joining) -> None:
        """Start the step. Errors: RunError without srun."""
        if shutil.which("srun") is None:
            raise RunError(
                "agents are started by srun, which is not on this host's PATH; have Slurm's"
                " commands there"
            )
        self._log = Path(join.folder) / "logs" / "slurm-agents.log"
        self._step = subprocess.Popen(
            self.command(self._log),
            env={**os.environ, **join.environment()},
            stdin=subprocess.DEVNULL,
        )

    def command(self, log: Path) -> Sequence[str]:
        """One task per host with all that the job has there, which ends when any of them fails."""
        return (
            "srun",
            "--export=ALL",
            "--kill-on-bad-exit=1",
            f"--nodes={self.hosts}",
            f"--ntasks={self.hosts}",
            "--ntasks-per-node=1",
            "--whole",
            "--overlap",
            "--cpu-bind=none",
            "--mpi=none",
            "--label",
            "--open-mode=append",
            f"--output={log}",
            "sh",
            "-c",
            _AGENT,
            sys.executable,
        )

    def ended(self) -> list[str]:
        """That the step has ended, with its last lines."""
        if self._step is None or self._step.poll() is None:
            return []
        status, self._step = self._step.returncode, None
        said = tail(self._log).strip().rpartition("\n")[2] if self._log is not None else ""
        return [
            f"srun ended with status {status}, and all agents with it; the last it said in"
            f" {self._log}: {said}"
        ]

    def stop(self) -> None:
        """Wait for the step, whose agents were asked to end, and end it; the job goes on with
        whatever follows."""
        if self._step is not None and not ended_within(self._step, _STOP_S):
            self._step.send_signal(signal.SIGTERM)
            end(self._step, _STOP_S)
        self._step = None


def _asked(*command: str) -> str:
    """What a command of Slurm answers. Errors: RunError."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise RunError(
            f"Slurm does not say which hosts the job has: {command[0]}: {said}; see sinfo"
        ) from error
