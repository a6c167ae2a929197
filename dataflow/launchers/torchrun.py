"""The launcher for hosts that all start the same command, with RANK and WORLD_SIZE, as torchrun
does."""

import functools
import os
import socket
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from dataflow.agent.environment import AgentEnvironment
from dataflow.errors import GraphError
from dataflow.launchers.bootstrap import SECRET, BootstrapServer, ask, secret_keys
from dataflow.launchers.launcher import Joining
from dataflow.launchers.local import Local, Slot
from dataflow.system.addresses import resolved
from dataflow.system.security import endpoint


@dataclass(frozen=True, kw_only=True)
class LaunchRanks:
    """What the environment says of this process's place in the launch."""

    rank: int
    hosts: int
    leads_host: bool
    """Whether it is the first of its host; one agent is enough for all of them."""
    master: str
    """Name or address of the host of rank 0."""
    port: int
    """At which rank 0 tells the others which run they join: the one after MASTER_PORT, at which
    torchrun itself may listen."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "LaunchRanks":
        """Errors: GraphError for what is missing or no number."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if not environ.get(name)]
        if missing:
            raise GraphError(
                "--on torchrun is for a command that is started on each host with"
                f" {', '.join(names)}, but {' and '.join(missing)} is not set; start it with"
                " torchrun, or set them"
            )
        numbers = {
            name: environ.get(name) or default
            for name, default in (
                ("RANK", ""),
                ("WORLD_SIZE", ""),
                ("MASTER_PORT", ""),
                ("LOCAL_RANK", "0"),
                ("LOCAL_WORLD_SIZE", "1"),
            )
        }
        for name, text in numbers.items():
            if not text.isdecimal():
                raise GraphError(f"{name} is '{text}', which is no number; set it as torchrun does")
        rank, world, port, local, on_each = map(int, numbers.values())
        if rank >= world or not on_each or world % on_each or not 0 < port < 65535:
            raise GraphError(
                f"RANK {rank} of WORLD_SIZE {world}, {on_each} on each host, with MASTER_PORT"
                f" {port} cannot be; ranks count from 0, each host has as many, and a port is below"
                " 65535"
            )
        return cls(
            rank=rank,
            hosts=world // on_each,
            leads_host=local == 0,
            master=environ["MASTER_ADDR"],
            port=port + 1,
        )


class Torchrun:
    """Rank 0 of such a launch, a Launcher: tells the others which run they join, and starts its own
    host's agent."""

    def __init__(self) -> None:
        self._server: BootstrapServer | None = None
        self._agent: Local | None = None

    @functools.cached_property
    def _ranks(self) -> LaunchRanks:
        return LaunchRanks.of(os.environ)

    @property
    def hosts(self) -> int:
        """As `Launcher.hosts`. Errors: GraphError for what the environment lacks."""
        return self._ranks.hosts

    @functools.cached_property
    def listen(self) -> str:
        """As `Launcher.listen`: MASTER_ADDR. Errors: GraphError."""
        return resolved(self._ranks.master, "MASTER_ADDR")

    def start(self, join: Joining) -> None:
        """As `Launcher.start`. Errors: GraphError without a secret, RunError where the port is
        taken."""
        keys = secret_keys(os.environ)
        os.environ.pop(SECRET, None)
        self._server = BootstrapServer(endpoint(self.listen, str(self._ranks.port)), keys, join)
        host, address, cpus, gpus = (
            os.environ.get(f"DATAFLOW_AGENT_{name}", "")
            for name in ("HOST", "ADDRESS", "CPUS", "GPUS")
        )
        slot = Slot(
            host=host or socket.gethostname(), address=address or self.listen, cpus=cpus, gpus=gpus
        )
        self._agent = Local([slot], self.listen)
        self._agent.start(join)

    def ended(self) -> list[str]:
        """As `Launcher.ended`; of the agent on this host: those elsewhere the scheduler hears
        itself."""
        if self._server is not None:
            self._server.answer()
        return self._agent.ended() if self._agent is not None else []

    def stop(self) -> None:
        """As `Launcher.stop`; the other agents belong to whoever started their processes, and end
        with the run."""
        if self._server is not None:
            self._server.close()
        if self._agent is not None:
            self._agent.stop()
        self._server = self._agent = None


def become_agent(environ: MutableMapping[str, str], within_s: float) -> None:
    """In any process of such a launch but rank 0: become its host's agent, or end where the host
    has one.

    Returns in rank 0. within_s: for rank 0 to begin. Errors: GraphError, DeadlineError.
    """
    ranks = LaunchRanks.of(environ)
    if ranks.rank == 0:
        return
    if not ranks.leads_host:
        sys.exit(0)
    keys = secret_keys(environ)
    environ.pop(SECRET, None)
    told = ask(endpoint(ranks.master, str(ranks.port)), keys, ranks.rank, within_s)
    pipe, end = os.pipe()
    os.write(end, told.keys)
    os.close(end)
    os.set_inheritable(pipe, True)
    agent = AgentEnvironment(
        scheduler=told.scheduler, folder=told.folder, keys=f"fd:{pipe}"
    ).to_environ()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", "dataflow.agent"], {**environ, **agent})
