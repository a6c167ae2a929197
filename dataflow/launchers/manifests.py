"""What Kubernetes is given of a run: a JobSet, or a RayJob for KubeRay, for kubectl apply."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from dataflow.errors import GraphError
from dataflow.launchers.job import Job

Manifest: TypeAlias = Mapping[str, Any]
Kind: TypeAlias = Literal["jobset", "rayjob"]

PORT = 29500
"""MASTER_PORT; a pod has its network for itself."""
_RESTARTS = 3
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
    ray_version: str = "2.60.0"
    """In the image; for a RayJob."""

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
                    "rayVersion": cluster.ray_version,
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
