"""Copies in an object store: S3 as a server of this machine speaks it, where there is one
(moto_server, of PyPI's moto[server,s3]).
"""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs
from rigs.graphs import tiny_graph
from rigs.machine import wait_until

from dataflow import GraphError, inline, run, verify
from dataflow.folder.copies.process import bring_back
from dataflow.folder.copies.store import Address, Store, joined
from dataflow.folder.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[int]:
    """Of a server with a bucket."""
    server = shutil.which("moto_server")
    if server is None:
        pytest.skip("there is no moto_server (PyPI: moto[server,s3])")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = int(free.getsockname()[1])
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(
            [server, "-H", "127.0.0.1", "-p", str(number)], stdout=log, stderr=log
        )
    try:
        wait_until(lambda: _is_open(number), 60.0, "the server")
        client = fs.S3FileSystem(
            endpoint_override=f"127.0.0.1:{number}",
            scheme="http",
            region="us-east-1",
            allow_bucket_creation=True,
        )
        client.create_dir("bucket")
        try:
            with client.open_output_stream("bucket/whole") as probe:
                probe.write(b"whole")
        except OSError as error:
            pytest.skip(
                "this server takes no file in parts (moto 5.2.1 does not: its issue 10055):"
                f" {error}"
            )
        yield number
    finally:
        process.kill()
        process.wait(10)


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def at(port: int, bucket: str = "bucket") -> str:
    return f"s3://{bucket}/runs?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"


def test_a_run_goes_on_from_a_bucket_and_a_bucket_that_is_not_there_is_refused(
    port: int, policy: Path, tmp_path: Path
) -> None:
    def go(steps: int, **how: object) -> RunFolder:
        graph = tiny_graph(policy, max_staleness=0, max_tokens=8, checkpoint_every=2)
        done = run(graph, steps=steps, on=inline(), quiet=True, **how)  # type: ignore[arg-type]
        assert done.verdict.clean, done.verdict
        return RunFolder.open(done.folder)

    def whole(part: int) -> list[int]:
        return Store(Address.of(joined(at(port), f"{begun.path.name}/part-{part:06d}"))).whole()

    begun = go(5, runs=tmp_path / "one", checkpoint_to=at(port))
    assert whole(1) == [2, 4, 5]
    shutil.rmtree(tmp_path / "one")
    folder = bring_back(at(port), tmp_path / "two")
    assert verify(folder.path).clean and folder.checkpoints.steps() == [5]
    go(6, resume=folder.path)
    assert whole(2) == [5, 6]

    began = time.monotonic()
    for address, why in ((at(port, "nobucket"), "Bucket 'nobucket' not found"), (at(1), "")):
        with pytest.raises(
            GraphError,
            match=f"checkpoints cannot go to 's3://.*{why}.*; look whether it is reached",
        ):
            run(
                tiny_graph(policy),
                on=inline(),
                runs=tmp_path / "no",
                quiet=True,
                checkpoint_to=address,
            )
    assert time.monotonic() - began < 60.0
