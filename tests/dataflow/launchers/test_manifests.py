"""What Kubernetes is given: objects that its published schemas take, and a restart that goes on
with the run.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from rigs.launchers.crd import faults, schema_of

from dataflow.errors import GraphError
from dataflow.launchers.submit import Cluster, Job, Kind, jobset, manifests, rayjob, to_yaml

JOB = Job(
    command=["python", "-m", "graphs.aipo", "--lr", "1e-4", "--policy", "it's: here"],
    name="aipo",
    hosts=4,
    cpus=16,
    gpus=8,
    runs="runs",
)


CLUSTER = Cluster(
    image="registry.local/dataflow-rl:1", claim="runs", memory="64Gi", mark="f00d", namespace="rl"
)


SECRET = "0123456789abcdef" * 4


def of_kind(kind: Kind) -> Any:
    return manifests(kind, JOB, CLUSTER, SECRET)[-1]


@pytest.mark.parametrize("kind", ["jobset", "rayjob"])
def test_the_published_schema_takes_the_manifest(kind: Kind) -> None:
    made = of_kind(kind)
    schema = schema_of(made["apiVersion"], made["kind"])
    assert not list(faults(schema, made))
    wrong = {**made, "spec": {**made["spec"], "replicas": 3}}
    assert list(faults(schema, wrong)) == [".spec: replicas is unknown"]


@pytest.mark.parametrize("kind", ["jobset", "rayjob"])
def test_the_yaml_says_what_the_objects_say(kind: Kind) -> None:
    yaml = pytest.importorskip("yaml")
    made = manifests(kind, JOB, CLUSTER, SECRET)
    assert list(yaml.safe_load_all(to_yaml(made))) == [plain(each) for each in made]


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def test_each_pod_of_a_jobset_knows_its_rank_the_first_address_and_the_secret_by_reference() -> (
    None
):
    secret, made = jobset(JOB, CLUSTER, SECRET)
    (group,) = made["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    environment = {
        each["name"]: each.get("value") or each["valueFrom"] for each in container["env"]
    }
    service = made["spec"]["network"]["subdomain"]
    assert environment["MASTER_ADDR"] == f"{made['metadata']['name']}-{group['name']}-0-0.{service}"
    assert environment["WORLD_SIZE"] == str(job["completions"]) == str(job["parallelism"]) == "4"
    assert job["completionMode"] == "Indexed" and "completion-index" in str(environment["RANK"])
    where = environment["DATAFLOW_SECRET"]["secretKeyRef"]
    assert (
        where["name"] == secret["metadata"]["name"] and secret["stringData"][where["key"]] == SECRET
    )
    assert SECRET not in to_yaml([made])


def test_no_pod_shares_64_mib_of_memory_and_all_share_the_runs() -> None:
    cluster = rayjob(JOB, CLUSTER)[-1]["spec"]["rayClusterSpec"]
    specs = [
        cluster["headGroupSpec"]["template"]["spec"],
        cluster["workerGroupSpecs"][0]["template"]["spec"],
    ]
    specs.append(
        jobset(JOB, CLUSTER, SECRET)[-1]["spec"]["replicatedJobs"][0]["template"]["spec"][
            "template"
        ]["spec"]
    )
    for spec in specs:
        mounted = {
            each["mountPath"]: each["name"] for each in spec["containers"][0]["volumeMounts"]
        }
        volumes = {each.pop("name"): each for each in map(dict, spec["volumes"])}
        assert volumes[mounted["/dev/shm"]] == {"emptyDir": {"medium": "Memory"}}
        assert volumes[mounted["/runs"]] == {"persistentVolumeClaim": {"claimName": "runs"}}


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("begun", [False, True])
def test_a_pod_that_is_started_again_goes_on_with_the_run(
    tmp_path: Path, begun: bool, rank: str
) -> None:
    """The script is run with a python that says what it is asked; only the first pod has the
    scheduler.
    """
    runs, python = tmp_path / "runs", tmp_path / "python"
    python.write_text('#!/bin/sh\nfor each; do echo "$each"; done\n')
    python.chmod(0o755)
    if begun:
        (runs / "latest").mkdir(parents=True)
        (runs / "latest" / "ledger.db").touch()
    script = JOB.shell("torchrun", str(runs), python="python", leads='[ "$RANK" = 0 ]')
    assert of_kind("jobset")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ][0]["args"] == ["sh", "-c", script.replace(str(runs), "/runs/aipo-f00d")]
    done = subprocess.run(
        ["sh", "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "RANK": rank},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    again = ["-m", "dataflow", "resume", f"{runs}/latest"]
    anew = [*JOB.command[1:], "--on", "torchrun", "--runs", str(runs)]
    assert done.stdout.splitlines() == (again if begun and rank == "0" else anew)


def test_a_cluster_without_a_shared_volume_is_refused() -> None:
    with pytest.raises(GraphError, match="--claim is not given"):
        Cluster(image="i", claim="", mark="f00d")
