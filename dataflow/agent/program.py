"""The forkserver of a host, a process of its own: runs the user's program up to its `run`, then
forks its workers.

python -m dataflow.agent.program SOCKETS FD
"""

import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from dataflow.agent.digest import built
from dataflow.agent.forkserver import Forkserver
from dataflow.agent.host_program import HOSTED, Hosted
from dataflow.agent.messages import FORKSERVER, SEND_S, Begin, Failed
from dataflow.agent.workload import ForkWorkload
from dataflow.graph import Graph
from dataflow.history.launch import Launch
from dataflow.planning.inputs import PlanInputs
from dataflow.planning.plan import Plan
from dataflow.system.child import die_with_parent
from dataflow.system.messages import Channel


def main(sockets: Path, end: socket.socket) -> None:
    """Become the forkserver of a host; returns where the program does not run a graph. sockets:
    removed at the end.
    """
    die_with_parent()
    control: Channel[Any] = Channel(end, FORKSERVER, SEND_S)
    begin = control.receive(SEND_S)
    assert isinstance(begin, Begin), "the agent says it first"
    launch = msgspec.convert(begin.launch, Launch)

    def serve(graph: Graph, plan: Plan) -> NoReturn:
        work = ForkWorkload.of(graph, plan)
        os.environ.update(work.environment)
        control.send(built(graph, plan, launch))
        clean_up = lambda: shutil.rmtree(sockets, ignore_errors=True)  # noqa: E731
        Forkserver(control, None, work.main, work.preload, clean_up).run()

    HOSTED.set(Hosted(inputs=msgspec.convert(begin.inputs, PlanInputs), serve=serve))
    try:
        launch.run_here()
        error = (
            "it came to its end and has run no graph; on a host, too, it has to get to main(build)"
            " or run(...)"
        )
    except BaseException as found:
        error = f"{type(found).__name__}: {found}"
    control.send(Failed(f"{launch.program} did not get to its run: {error}"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
    sys.exit(1)
