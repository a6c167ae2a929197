"""The tests' OpenEnv server as a process of its own, which is started again on its port whenever it
has died.

python served_alone.py PORT LOG CAPACITY: serve until killed; LOG gets a line for each session that
begins or ends.
"""

import os
import signal
import socket
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from rigs.worlds.servers import openenv


def free_port() -> int:
    """One of loopback that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    port, log, capacity = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    with openenv(capacity=capacity, port=port, log=log), log.open("a") as file:
        file.write(f"ready {os.getpid()}\n")
        file.flush()
        while True:
            signal.pause()


if __name__ == "__main__":
    main()
