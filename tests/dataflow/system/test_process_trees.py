"""What processes have started, as the operating system tells it."""

import os
import subprocess

from rigs.machine import wait_until

from dataflow.system import processes


def test_what_several_processes_have_started_is_found_in_one_look() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60 & wait"], process_group=0) as shell:
        try:
            wait_until(lambda: len(processes.below(shell.pid)) == 2, 30.0)
            found = processes.below_each([shell.pid, os.getpid()])
            assert sorted(found[shell.pid]) == sorted(processes.below(shell.pid))
            assert {shell.pid, *found[shell.pid]} <= set(found[os.getpid()])
        finally:
            os.killpg(shell.pid, 9)
