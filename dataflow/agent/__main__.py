"""The agent of this host; a launcher starts it, and says by environment variables what it joins.

python -m dataflow.agent
"""

import contextlib
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

from dataflow.agent import run_disk
from dataflow.agent.agent import Agent, log_name
from dataflow.agent.environment import AgentEnvironment
from dataflow.agent.rendezvous import leave
from dataflow.errors import DataflowError
from dataflow.folder import socket_folder
from dataflow.planning.hosts import Host
from dataflow.planning.this_machine import this_machine
from dataflow.system.addresses import own_address
from dataflow.system.log import log_to
from dataflow.system.security import check_listen


def main() -> int:
    """Join the run that the environment names, and stay until it ends; the exit status."""
    folder, name, terminal = Path(os.devnull), "", os.dup(2)
    try:
        environment = AgentEnvironment.take(os.environ)
        host = host_here(environment)
        folder, name = Path(environment.folder), host.name
        run_disk.check_under_way(name, folder)
        keys = environment.read_keys()
        host = replace(host, own_folder=not run_disk.sees(folder, keys))
        if host.own_folder:
            run_disk.make(name, folder, environment.scheduler)
        log_to(folder / "logs" / log_name(name))
        address = own_address(environment.address, environment.scheduler)
        check_listen(address)
        agent = Agent(environment, keys, host, address, socket_folder.make())
    except DataflowError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        leave(folder, name, f"host '{name}' does not take part: {error}")
        return 2
    for number in (signal.SIGINT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)  # a terminal's: the scheduler says what it means
    for number in (signal.SIGTERM, signal.SIGHUP):  # the host's own, unless it is started by nohup
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: agent.leave())
    status = agent.run()
    if agent.unheard:
        with contextlib.suppress(OSError):
            os.write(terminal, f"{agent.unheard}\n".encode())
    return status


def host_here(told: AgentEnvironment) -> Host:
    """This machine, or the part of it that the run has."""
    has = this_machine()
    return Host(
        name=told.host or socket.gethostname(),
        cpus=int(told.cpus or has.cpus),
        gpus=int(told.gpus or has.gpus),
        memory_bytes=has.memory_bytes,
        gpu_memory_bytes=has.gpu_memory_bytes,
    )


if __name__ == "__main__":
    sys.exit(main())
