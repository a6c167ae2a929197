"""Runs a command, and ends it with all that it started when its parent ends: python keeper.py PARENT COMMAND...

A program by itself, which imports nothing of this project: it leads the process group in which the command runs.
"""

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1


def main() -> None:
    """Start the command, wait for its end or for that of the parent, and end what is left."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    library = ctypes.CDLL(None)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    library.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    if os.getppid() != parent:
        return
    child = os.fork()
    if child == 0:
        library.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
        os._exit(127)
    for stream in (0, 1):
        os.close(stream)
    os.waitpid(child, 0)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
