"""`dataflow launch`: has a cluster start a run, and go on with it after each restart."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from dataflow.errors import GraphError
from dataflow.launchers import manifests, sbatch
from dataflow.launchers.job import Job, name_of

Command = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- COMMAND...")]


def launch(
    command: Command = (),
    *,
    slurm: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    kubernetes: manifests.Kind | None = None,
    nodes: int = 1,
    cpus: int | None = None,
    gpus: int = 0,
    name: str = "",
    runs: Path = Path("runs"),
    sbatch_options: Annotated[str, tyro.conf.arg(name="sbatch")] = "",
    image: str = "",
    claim: str = "",
    namespace: str = "default",
    memory: str = "",
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Have a cluster start a run over several hosts: dataflow launch --slurm --nodes 4 -- python -m
    graphs.aipo.

    Under Slurm the job is submitted; for Kubernetes a manifest is printed, for kubectl apply -f -.
    See docs/launch.md.

    Args:
        command: what makes the run, without --on and --runs.
        slurm: hand it to Slurm.
        kubernetes: print a JobSet, or a RayJob for KubeRay.
        nodes: hosts of the run.
        cpus: cores of each; Slurm gives whole nodes if left out.
        gpus: accelerators of each.
        name: of the job; the program's if left out.
        runs: Slurm: folder of the runs, which all hosts see; each job has one in it.
        sbatch_options: more options of sbatch, as in time=02:00:00,partition=gpu.
        image: Kubernetes: made of the Containerfile.
        claim: Kubernetes: the PersistentVolumeClaim for the runs, which all pods may mount at once.
        namespace: Kubernetes: where the objects are made.
        memory: Kubernetes: of each pod, as in 64Gi.
        dry_run: print the script, and submit nothing.
    """
    if slurm == (kubernetes is not None):
        raise GraphError(
            "a launch is for one cluster, but names"
            f" {'both --slurm and --kubernetes' if slurm else 'none'}; give --slurm, or"
            " --kubernetes jobset or rayjob"
        )
    job = Job(
        command=command,
        name=name or name_of(command),
        hosts=nodes,
        cpus=cpus,
        gpus=gpus,
        runs=str(runs.absolute()),
    )
    if kubernetes is not None:
        cluster = manifests.Cluster(
            image=image, claim=claim, namespace=namespace, memory=memory, mark=secrets.token_hex(4)
        )
        print(
            manifests.to_yaml(manifests.manifests(kubernetes, job, cluster, secrets.token_hex(32))),
            end="",
        )
        return 0
    written = sbatch.script(job, str(Path.cwd()), _options(sbatch_options))
    if dry_run:
        print(written, end="")
        return 0
    runs.mkdir(parents=True, exist_ok=True)
    number = sbatch.submit(written)
    print(
        f"Slurm has it as job {number}; its runs go to {job.runs}/slurm-{number}, its log to logs/"
        " there"
    )
    return 0


def _options(text: str) -> dict[str, str]:
    """`time=02:00:00,partition=gpu` as a mapping."""
    parts: Sequence[tuple[str, str, str]] = [
        part.partition("=") for part in filter(None, text.split(","))
    ]
    return {name.strip(): value for name, _, value in parts}
