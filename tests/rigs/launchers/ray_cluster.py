"""A Ray cluster on loopback alone, for as long as a test lasts: a head without cores, and nodes.

As a program: python ray_cluster.py NODES CORES; says its addresses, then takes the words "lose" and
"gain".
"""

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""For all that speak to it: without the second, Ray takes an address of this machine in place of
loopback."""

NEEDED = ("ray", "grpc", "aiohttp")
"""`ray` alone lacks what serves drivers from outside, and jobs."""


@dataclass(frozen=True)
class RayCluster:
    """What is said to it."""

    address: str
    client: str
    """For drivers outside of it."""
    dashboard: str
    _words: IO[str]
    _answers: IO[str]

    def lose(self) -> None:
        """Its last node dies."""
        self._say("lose")

    def gain(self) -> None:
        """A node joins."""
        self._say("gain")

    def _say(self, word: str) -> None:
        self._words.write(word + "\n")
        self._words.flush()
        assert self._answers.readline().strip() == word


@contextlib.contextmanager
def ray_cluster(nodes: int = 3, cores: int = 1) -> Iterator[RayCluster]:
    """The test is skipped where Ray is not installed."""
    if any(importlib.util.find_spec(each) is None for each in NEEDED):
        pytest.skip(
            "Ray, or what its extra `default` has, is not installed: pip install 'dataflow-rl[ray]'"
        )
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # its sockets have to have short names
    root = str(Path(__file__).parents[3])
    quiet = {**ENVIRONMENT, "PYTHONPATH": root, "RAY_TMPDIR": folder}
    with (Path(folder) / "cluster.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, str(nodes), str(cores)],
            env={**os.environ, **quiet},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        assert process.stdin is not None and process.stdout is not None
        said = process.stdout.readline()
        assert said, (Path(folder) / "cluster.log").read_text()[-2000:]
        yield RayCluster(**json.loads(said), _words=process.stdin, _answers=process.stdout)
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # type: ignore[union-attr]
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()  # type: ignore[union-attr]
        shutil.rmtree(folder, ignore_errors=True)


def main(count: int, cores: int) -> None:
    """Until the other side closes."""
    from ray.cluster_utils import Cluster

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray says is no answer
    head = {
        "node_ip_address": "127.0.0.1",
        "num_cpus": 0,
        "include_dashboard": True,
        "dashboard_host": "127.0.0.1",
        "dashboard_port": 0,
        "ray_client_server_port": (port := _free_port()),
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)

    def gain() -> object:
        return cluster.add_node(num_cpus=cores, node_ip_address="127.0.0.1")

    nodes = [gain() for _ in range(count)]
    told = {
        "address": cluster.address,
        "client": f"ray://127.0.0.1:{port}",
        "dashboard": f"http://{cluster.webui_url}",
    }
    print(json.dumps(told), file=answers, flush=True)
    for word in map(str.strip, sys.stdin):
        if word == "lose":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        else:
            nodes.append(gain())
        print(word, file=answers, flush=True)
    cluster.shutdown()


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
