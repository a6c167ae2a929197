"""An agent's handle on the forkserver of its host, which runs the user's program before it forks
workers."""

from pathlib import Path

from dataflow.agent.forkserver_client import ForkserverClient
from dataflow.agent.forkserver_messages import SEND_S
from dataflow.agent.messages import FORKSERVER, Begin, Built, Failed
from dataflow.system.channel import Channel
from dataflow.system.child import program
from dataflow.system.messages import MessageError

_PROGRAM = "dataflow.agent.program"


class HostForkserver(ForkserverClient):
    """A forkserver in the hands of its agent; a fresh process, as an agent has threads that no fork
    may inherit.

    consumes: as `ForkserverClient`, once `answer` was `Built`
    produces: what the program came to; events of the workers
    waits for: nothing
    unblocked by: its answers
    """

    def __init__(self, begin: Begin, sockets: Path) -> None:
        """Start it. sockets: the folder that it removes when all workers have ended."""
        connection, theirs = Channel.pair(FORKSERVER, SEND_S)
        process = program(_PROGRAM, str(sockets), end=theirs)
        theirs.close()
        self._hold(connection, process)
        connection.send(begin)

    def answer(self) -> Built | Failed | None:
        """What came of the program; None: nothing yet."""
        try:
            messages = self._connection.arrived()
        except (EOFError, OSError, MessageError) as error:
            status = self._process.poll()
            how = f"ended with status {status}" if status is not None else f"is gone ({error})"
            return Failed(
                f"the process that runs the program {how}; its agent's log in the run folder tells"
                " more"
            )
        assert len(messages) < 2, "it forks nobody before it is asked to"
        return messages[0] if messages else None
