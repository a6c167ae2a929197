"""A run that a cluster is to start, and to go on with each time it starts it again."""

import itertools
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dataflow.errors import GraphError

_OURS = ("--on", "--runs", "--resume", "--inline", "--explain", "--draw")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the cluster's script runs on one host or all, as its launcher wants it. Errors:
    GraphError.
    """

    command: Sequence[str]
    """That makes the run, as at a terminal: python -m graphs.aipo --steps 100."""
    name: str
    """Of the job."""
    hosts: int
    cpus: int | None = None
    """Of each host; None: all, or as many as the cluster gives."""
    gpus: int = 0
    """Of each host."""
    runs: str
    """Folder of the runs, which all hosts see."""

    def __post_init__(self) -> None:
        if not self.command:
            raise GraphError(
                "a launch starts a program, but none is given; put it last, as in "
                "dataflow launch --slurm --nodes 4 -- python -m graphs.aipo"
            )
        for flag in _OURS:
            if any(part == flag or part.startswith(f"{flag}=") for part in self.command):
                raise GraphError(
                    "the launch itself says where and into which folder a program runs, but its"
                    f" command has {flag}; leave that out, and give dataflow launch --runs for the"
                    " folder"
                )
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", self.name):
            raise GraphError(
                "a job's name is made of at most 40 of a-z, 0-9 and '-', and neither begins nor"
                f" ends with '-', but it is '{self.name}'; give --name"
            )
        for name, least, value in (
            ("hosts", 1, self.hosts),
            ("cores", 1, self.cpus),
            ("accelerators", 0, self.gpus),
        ):
            if value is not None and value < least:
                raise GraphError(
                    f"a job has at least {least} {name} each, but {value} are asked for; give more"
                )

    def shell(self, on: str, runs: str, *, python: str = "", leads: str = "") -> str:
        """Lines of sh that begin the run, or go on with it where they began it before; the shell is
        replaced.

        on: launcher within the job. runs: folder of this job's runs, as text for the shell. python:
        the interpreter for `dataflow resume`; this one's when empty. leads: holds in the shell that
        has the scheduler, where others run these lines too.
        """
        begin, alone = shlex.join([*self.command, "--on", on]), f"{leads} && " if leads else ""
        return (
            f"runs={runs}\n"
            f'if {alone}[ -e "$runs/latest/ledger.db" ]; then\n'
            f'    exec {shlex.quote(python or sys.executable)} -m dataflow resume "$runs/latest"\n'
            f"fi\n"
            f'exec {begin} --runs "$runs"\n'
        )


def name_of(command: Sequence[str]) -> str:
    """What a job is called if nobody says it: the last part of its module or file."""
    after = [part for before, part in itertools.pairwise(command) if before == "-m"]
    files = [part for part in command if part.endswith(".py")]
    base = (
        (after or files or ["dataflow"])[0].removesuffix(".py").replace("/", ".").rpartition(".")[2]
    )
    return re.sub(r"[^a-z0-9]+", "-", base.lower()).strip("-")[:40].strip("-") or "dataflow"
