"""`dataflow launch`: has a cluster start a run, and go on with it after each restart."""

import itertools
import json
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import tyro

from dataflow.errors import GraphError, RunError

_OURS = ("--on", "--runs", "--resume", "--inline", "--explain", "--draw")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the cluster's script runs on one host or all, as its launcher wants it. Errors:
    GraphError.
    """

    command: Sequence[str]
    """That makes the run, as at a terminal: python -m graphs.aipo --steps 100."""
    name: str
    """Of the job."""
    hosts: int
    cpus: int | None = None
    """Of each host; None: all, or as many as the cluster gives."""
    gpus: int = 0
    """Of each host."""
    runs: str
    """Folder of the runs, which all hosts see."""

    def __post_init__(self) -> None:
        if not self.command:
            raise GraphError(
                "a launch starts a program, but none is given; put it last, as in "
                "dataflow launch --slurm --nodes 4 -- python -m graphs.aipo"
            )
        for flag in _OURS:
            if any(part == flag or part.startswith(f"{flag}=") for part in self.command):
                raise GraphError(
                    "the launch itself says where and into which folder a program runs, but its"
                    f" command has {flag}; leave that out, and give dataflow launch --runs for the"
                    " folder"
                )
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", self.name):
            raise GraphError(
                "a job's name is made of at most 40 of a-z, 0-9 and '-', and neither begins nor"
                f" ends with '-', but it is '{self.name}'; give --name"
            )
        for name, least, value in (
            ("hosts", 1, self.hosts),
            ("cores", 1, self.cpus),
            ("accelerators", 0, self.gpus),
        ):
            if value is not None and value < least:
                raise GraphError(
                    f"a job has at least {least} {name} each, but {value} are asked for; give more"
                )

    def shell(self, on: str, runs: str, *, python: str = "", leads: str = "") -> str:
        """Lines of sh that begin the run, or go on with it where they began it before; the shell is
        replaced.

        on: launcher within the job. runs: folder of this job's runs, as text for the shell. python:
        the interpreter for `dataflow resume`; this one's when empty. leads: holds in the shell that
        has the scheduler, where others run these lines too.
        """
        begin, alone = shlex.join([*self.command, "--on", on]), f"{leads} && " if leads else ""
        return (
            f"runs={runs}\n"
            f'if {alone}[ -e "$runs/latest/ledger.db" ]; then\n'
            f'    exec {shlex.quote(python or sys.executable)} -m dataflow resume "$runs/latest"\n'
            f"fi\n"
            f'exec {begin} --runs "$runs"\n'
        )


def name_of(command: Sequence[str]) -> str:
    """What a job is called if nobody says it: the last part of its module or file."""
    after = [part for before, part in itertools.pairwise(command) if before == "-m"]
    files = [part for part in command if part.endswith(".py")]
    base = (
        (after or files or ["dataflow"])[0].removesuffix(".py").replace("/", ".").rpartition(".")[2]
    )
    return re.sub(r"[^a-z0-9]+", "-", base.lower()).strip("-")[:40].strip("-") or "dataflow"


# Slurm

_SUBMIT_S = 30.0
LOG = "slurm-%j.log"
"""Of what goes wrong before an attempt has a log of its own; in the folder of the runs."""


def batch_script(job: Job, folder: str, options: Mapping[str, str] | None = None) -> str:
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


# Kubernetes

Manifest: TypeAlias = Mapping[str, Any]
Kind: TypeAlias = Literal["jobset", "rayjob"]

PORT = 29500
"""MASTER_PORT; a pod has its network for itself."""
_RESTARTS = 3
_RAY_VERSION = "2.60.0"
"""In the image; for a RayJob."""
_USER = 1000
"""Of the image; the volume is made writable for it."""
_ONCE = {"fsGroupChangePolicy": "OnRootMismatch"}
_RUNS, _SECRET, _GROUP = "/runs", "secret", "hosts"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What a manifest has to know of the cluster it is for. Errors: GraphError."""

    image: str
    """Made of the Containerfile, with the user's program in it where that is not one of ours."""
    claim: str
    """A PersistentVolumeClaim that all pods may mount at once (ReadWriteMany): the runs go
    there."""
    namespace: str = "default"
    memory: str = ""
    """Of each pod, as Kubernetes writes it: 64Gi. Half of it may be shared memory."""
    mark: str
    """Of this launch: its runs go to a folder with it, so that only its own restarts go on with
    them."""

    def __post_init__(self) -> None:
        missing = [f"--{name}" for name in ("image", "claim") if not getattr(self, name)]
        if missing:
            raise GraphError(
                f"pods run an image and share a volume for their runs, but {' and '.join(missing)}"
                " is not given; build the Containerfile, make a PersistentVolumeClaim with"
                " ReadWriteMany, and name both"
            )


def manifests(kind: Kind, job: Job, cluster: Cluster, secret: str) -> Sequence[Manifest]:
    """The objects of a run, in the order in which they are to be made. secret: for those who may
    join; a new one.
    """
    return jobset(job, cluster, secret) if kind == "jobset" else rayjob(job, cluster)


def jobset(job: Job, cluster: Cluster, secret: str) -> Sequence[Manifest]:
    """A pod per host, all with the same command; the JobSet's headless service names them for each
    other.

    When one of them fails, all are made again, and go on with the run.
    """
    key = {"secretKeyRef": {"name": job.name, "key": _SECRET}}
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    environment = [
        {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        {"name": "WORLD_SIZE", "value": str(job.hosts)},
        {"name": "MASTER_ADDR", "value": f"{job.name}-{_GROUP}-0-0.{job.name}"},
        {"name": "MASTER_PORT", "value": str(PORT)},
        {"name": "DATAFLOW_SECRET", "valueFrom": key},
    ]
    pod = _pod(job, cluster, args=["sh", "-c", _script(job, cluster, "torchrun")], env=environment)
    pod["restartPolicy"] = "Never"
    template = {
        "spec": {
            "parallelism": job.hosts,
            "completions": job.hosts,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"spec": pod},
        }
    }
    return (
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": _metadata(job, cluster),
            "type": "Opaque",
            "stringData": {_SECRET: secret},
        },
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(job, cluster),
            "spec": {
                "network": {
                    "enableDNSHostnames": True,
                    "publishNotReadyAddresses": True,
                    "subdomain": job.name,
                },
                "failurePolicy": {"maxRestarts": _RESTARTS},
                "replicatedJobs": [{"name": _GROUP, "replicas": 1, "template": template}],
            },
        },
    )


def rayjob(job: Job, cluster: Cluster) -> Sequence[Manifest]:
    """A Ray cluster for the run alone: a head that computes nothing, and a worker per host.

    Should the job fail, KubeRay makes another cluster, and the job goes on with the run there.
    """
    head = {
        "rayStartParams": {"num-cpus": "0"},
        "template": {"spec": _pod(job, cluster, alone=True)},
    }
    workers = {
        "groupName": _GROUP,
        "replicas": job.hosts,
        "minReplicas": job.hosts,
        "maxReplicas": job.hosts,
        "rayStartParams": {},
        "template": {"spec": _pod(job, cluster)},
    }
    return (
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": _metadata(job, cluster),
            "spec": {
                "submissionMode": "HTTPMode",
                "entrypoint": _script(job, cluster, f"ray:{job.hosts}"),
                "shutdownAfterJobFinishes": True,
                "backoffLimit": _RESTARTS,
                "rayClusterSpec": {
                    "rayVersion": _RAY_VERSION,
                    "authOptions": {"mode": "token"},
                    "headGroupSpec": head,
                    "workerGroupSpecs": [workers],
                },
            },
        },
    )


def to_yaml(objects: Sequence[Manifest]) -> str:
    """As one stream of documents; written here, as a library for YAML also makes objects of what it
    reads.
    """
    return "".join(f"---\n{_block(manifest, 0)}" for manifest in objects)


def _pod(job: Job, cluster: Cluster, *, alone: bool = False, **container: Any) -> dict[str, Any]:
    """alone: of a pod that computes nothing."""
    limits = (
        {}
        if alone
        else {
            **({"cpu": str(job.cpus)} if job.cpus else {}),
            **({"memory": cluster.memory} if cluster.memory else {}),
            **({"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}),
        }
    )
    mounts = [{"name": "runs", "mountPath": _RUNS}, {"name": "memory", "mountPath": "/dev/shm"}]
    runs = {"name": "runs", "persistentVolumeClaim": {"claimName": cluster.claim}}
    memory = {"name": "memory", "emptyDir": {"medium": "Memory"}}
    return {
        "securityContext": {"runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER, **_ONCE},
        "containers": [
            {
                "name": "dataflow",
                "image": cluster.image,
                **container,
                **({"resources": {"limits": limits, "requests": limits}} if limits else {}),
                "volumeMounts": mounts,
            }
        ],
        "volumes": [runs, memory],
    }


def _script(job: Job, cluster: Cluster, on: str) -> str:
    leads = '[ "$RANK" = 0 ]' if on == "torchrun" else ""
    return job.shell(on, f"{_RUNS}/{job.name}-{cluster.mark}", python="python", leads=leads)


def _metadata(job: Job, cluster: Cluster) -> Manifest:
    return {"name": job.name, "namespace": cluster.namespace}


def _block(value: Any, depth: int) -> str:
    """A mapping or a list in YAML's block style; leaves are JSON, which is YAML too, texts of
    several lines literal.
    """
    indent = "  " * depth
    if isinstance(value, Mapping):
        return "".join(f"{indent}{name}:{_entry(item, depth)}" for name, item in value.items())
    return "".join(f"{indent}-{_item(item, depth)}" for item in value)


def _entry(value: Any, depth: int) -> str:
    if isinstance(value, Mapping | list | tuple) and value:
        return f"\n{_block(value, depth + 1)}"
    if (
        isinstance(value, str)
        and value.count("\n") > 1
        and value.endswith("\n")
        and not value.startswith(" ")
    ):
        lines = "".join(f"{'  ' * (depth + 1)}{line}\n" for line in value.splitlines())
        return f" |\n{lines}"
    return f" {json.dumps(value)}\n"


def _item(value: Any, depth: int) -> str:
    """The first line of a mapping stands behind the dash."""
    if isinstance(value, Mapping) and value:
        return f" {_block(value, depth + 1).lstrip()}"
    return _entry(value, depth)


# The command

Command = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- COMMAND...")]


def launch(
    command: Command = (),
    *,
    slurm: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    kubernetes: Kind | None = None,
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
        cluster = Cluster(
            image=image, claim=claim, namespace=namespace, memory=memory, mark=secrets.token_hex(4)
        )
        print(
            to_yaml(manifests(kubernetes, job, cluster, secrets.token_hex(32))),
            end="",
        )
        return 0
    written = batch_script(job, str(Path.cwd()), _options(sbatch_options))
    if dry_run:
        print(written, end="")
        return 0
    runs.mkdir(parents=True, exist_ok=True)
    number = submit(written)
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
