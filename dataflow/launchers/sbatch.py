"""The batch script of a run under Slurm."""

import re
import shlex
import subprocess
from collections.abc import Mapping

from dataflow.errors import GraphError, RunError
from dataflow.launchers.job import Job

_SUBMIT_S = 30.0
LOG = "slurm-%j.log"
"""Of what goes wrong before an attempt has a log of its own; in the folder of the runs."""


def script(job: Job, folder: str, options: Mapping[str, str] | None = None) -> str:
    """A script for sbatch. folder: where the program starts. options: more of sbatch's, by long
    name.

    The scheduler runs on the first host; its launcher starts an agent on each with srun. Requeued,
    after a host was lost or somebody else went before, the job goes on with its run.
    """
    given: dict[str, str] = {
        "job-name": job.name,
        "nodes": str(job.hosts),
        "ntasks-per-node": "1",
        **({"cpus-per-task": str(job.cpus)} if job.cpus else {"exclusive": ""}),
        **({"gpus-per-node": str(job.gpus)} if job.gpus else {}),
        "requeue": "",
        "open-mode": "append",
        "output": shlex.quote(f"{job.runs}/{LOG}"),
        # the first signal, to the scheduler alone: it ends the step under way and writes a
        # checkpoint
        "signal": "B:INT@120",
    }
    for name, value in (options or {}).items():
        if not re.fullmatch(r"[a-z][a-z-]*", name) or "\n" in value:
            raise GraphError(
                f"an option of sbatch is its long name and a value, but got '{name}={value}'; write"
                " it as time=02:00:00"
            )
        given[name] = value
    lines = "\n".join(
        f"#SBATCH --{name}{'=' if value else ''}{value}" for name, value in given.items()
    )
    runs = f"{shlex.quote(job.runs)}/slurm-$SLURM_JOB_ID"
    return (
        f"#!/bin/sh\n{lines}\n"
        f"cd {shlex.quote(folder)} || exit 1\n"
        f'mkdir -p {runs}/logs && exec >>{runs}/logs/attempt-"${{SLURM_RESTART_COUNT:-0}}".log 2>&1'
        " || exit 1\n"
        f"{job.shell('slurm', runs)}"
    )


def submit(written: str) -> str:
    """Hand a script to Slurm; the job's number. Errors: RunError, with what sbatch says."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=written,
            capture_output=True,
            text=True,
            timeout=_SUBMIT_S,
        )
    except FileNotFoundError:
        raise RunError(
            "a job is handed to Slurm by sbatch, which is not on this machine's PATH; launch on a"
            " machine of the cluster, or take the script that --dry-run prints there"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(
            f"sbatch did not answer within {_SUBMIT_S:.0f} s; see sdiag, and squeue whether it was"
            " taken"
        ) from None
    if done.returncode:
        raise RunError(
            f"Slurm does not take the job: {done.stderr.strip()}; see sinfo for what there is"
        )
    return done.stdout.strip().partition(";")[0]
