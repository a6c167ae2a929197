"""The interface of launchers: they start agents, watch them and stop them; all else is between
agents and scheduler.
"""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from dataflow.agent.environment import AgentEnvironment
from dataflow.history.launch import Launch


@dataclass(frozen=True, kw_only=True)
class Joining:
    """What agents have to know to join a run."""

    address: str
    """Of the scheduler's socket for agents, as other hosts reach it: tcp://HOST:PORT."""
    keys: bytes = field(repr=False)
    """The run's, as `RunKeys.to_bytes`; never on a command line, nor in a file that others can
    read."""
    keys_file: str
    """A file of mode 0600 in the run folder that has them too, while the run lasts."""
    launch: Launch
    """The program whose graph is run."""
    folder: str
    """The run folder."""

    def agent(self, **own: str) -> AgentEnvironment:
        """What one agent is told. own: fields that are of it alone."""
        return AgentEnvironment(
            scheduler=self.address, keys=self.keys_file, folder=self.folder, **own
        )


@runtime_checkable
class Launcher(Protocol):
    """Where the hosts of a run come from."""

    @property
    def hosts(self) -> int:
        """How many agents the run waits for before it is planned."""

    @property
    def listen(self) -> str:
        """Address of this machine at which the agents reach the scheduler, where the user names
        none.
        """

    def start(self, join: Joining) -> None:
        """Have an agent started on each host; returns before they are there. Errors: RunError where
        none can be.
        """

    def ended(self) -> list[str]:
        """Sentences about agents that have ended by themselves or cannot be had, each told once;
        asked often.
        """

    def stop(self) -> None:
        """End what was started, and nothing else; the agents were asked to end before. Does nothing
        a second time.
        """
