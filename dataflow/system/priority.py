"""Letting a process have what nobody else wants of processors and disks."""

import contextlib
import os

import psutil
import pyarrow as pa

LOWEST = 19


def step_back(pid: int = 0) -> None:
    """Let a process of this user, and the threads and processes that it starts from now on, go
    last; 0: this one, whose Arrow computes on one thread then.
    """
    os.setpriority(os.PRIO_PROCESS, pid, LOWEST)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError, psutil.Error):
        psutil.Process(pid or None).ionice(psutil.IOPRIO_CLASS_IDLE)
    if not pid:
        pa.set_cpu_count(1)
        pa.set_io_thread_count(1)
