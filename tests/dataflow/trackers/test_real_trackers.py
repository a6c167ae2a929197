"""Each tracker against its real library, offline, read back with what the library itself reads
with; skipped, with the reason, where the library is not installed.
"""

import errno
import http.client
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tracked_runs import STEPS, add, line
from wandb_files import history, wandb_records

from dataflow.folder.run_folder import RunFolder
from dataflow.trackers import (
    MlflowTracker,
    OpenTelemetryTracker,
    PrometheusTracker,
    StepGroups,
    TensorboardTracker,
    TrackedRun,
    WandbTracker,
)

Keep = Callable[..., Any]


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No library finds what this machine's user has configured, nor a network."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


def made_otherwise(folder: RunFolder) -> None:
    """A return to step 4: it comes out the same, the last one otherwise, and one more is made."""
    folder.append_metrics(line(4, 0.25, seconds_step=9.0))
    folder.append_metrics(line(5, 0.75))
    add(folder, 6)


def test_tensorboard_has_the_curve_as_it_was_made_last_and_texts(
    folder: RunFolder, keep: Keep
) -> None:
    pytest.importorskip(
        "tensorboard", reason="tensorboard is not installed: pip install 'dataflow-rl[tensorboard]'"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert keep("tensorboard").finish() == [
        f"tensorboard: tensorboard --logdir {folder.path / 'tensorboard'}"
    ]
    made_otherwise(folder)
    assert len(keep(TensorboardTracker).finish()) == 1
    seen = EventAccumulator(str(folder.path / "tensorboard"), size_guidance={"tensors": 0})
    seen.Reload()
    assert [(e.step, round(e.value, 4)) for e in seen.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, 0.3333),
        (4, 0.25),
        (5, 0.75),
        (6, 0.1667),
    ]
    assert (
        "time/seconds_step" in seen.Tags()["scalars"]
        and "train/dropped.stale" in seen.Tags()["scalars"]
    )
    texts = {
        tag: seen.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode()
        for tag in ("config", "graph", "rollouts")
    }
    assert "trainer.operator" in texts["config"] and "prompts -&gt; generator" in texts["graph"]
    assert "answer 1 4" in texts["rollouts"] and "<script>" not in texts["rollouts"]


def test_wandb_goes_on_with_the_same_run_offline(folder: RunFolder, keep: Keep) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'dataflow-rl[wandb]'")
    (said,) = keep("wandb").finish()
    assert (
        said.startswith("wandb: offline (nobody has logged in: wandb login) in ")
        and "wandb sync" in said
    )
    made_otherwise(folder)
    assert len(keep(WandbTracker(mode="offline")).finish()) == 1
    first, second = wandb_records(folder.path)
    runs = [
        record.run
        for part in (first, second)
        for record in part
        if record.WhichOneof("record_type") == "run"
    ]
    assert len({run.run_id for run in runs}) == 1 and {run.display_name for run in runs} == {
        folder.path.name
    }
    assert {run.project for run in runs} == {"fakes"}
    config = {
        item.key or ".".join(item.nested_key): item.value_json for item in runs[0].config.update
    }
    assert config["seed"] == "7" and "prompts -> generator" in config["edges"]
    steps = [(row["step"], round(row["loss"], 4)) for row in history(first) if "loss" in row]
    assert steps == [(1, 1.0), (2, 0.5), (3, 0.3333), (4, 0.25), (5, 0.2)]
    assert [(row["step"], round(row["loss"], 4)) for row in history(second) if "loss" in row] == [
        (5, 0.75),
        (6, 0.1667),
    ]
    assert [row["rollouts.nrows"] for row in history(first) if "rollouts.nrows" in row] == [8]
    (table,) = folder.path.glob("wandb/offline-run-*/files/media/table/rollouts_*.json")
    assert "answer 1 4" in table.read_text()
    assert [row["graph._type"] for row in history(first) if "graph._type" in row] == ["html-file"]


def test_trackio_goes_on_with_the_same_run(
    folder: RunFolder, keep: Keep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip(
        "trackio", reason="trackio is not installed: pip install 'dataflow-rl[trackio]'"
    )
    assert keep("trackio").finish() == ["trackio: trackio show --project fakes"]
    made_otherwise(folder)
    assert len(keep("trackio").finish()) == 1
    import trackio.sqlite_storage

    monkeypatch.setattr(trackio.sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    store = trackio.sqlite_storage.SQLiteStorage
    assert store.get_runs("fakes") == [folder.path.name]
    rows = store.get_logs("fakes", folder.path.name)
    assert [(row["step"], round(row["loss"], 4)) for row in rows if "loss" in row] == [
        (1, 1.0),
        (2, 0.5),
        (3, 0.3333),
        (4, 0.25),
        (5, 0.2),
        (5, 0.75),
        (6, 0.1667),
    ]
    (table,) = [row["rollouts"]["_value"] for row in rows if isinstance(row.get("rollouts"), dict)]
    assert len(table) == 8 and "answer 1 4" in {row["completion"] for row in table}
    assert store.get_run_config("fakes", folder.path.name)["seed"] == 7


@pytest.mark.filterwarnings("ignore")  # of MLflow's own libraries
@pytest.mark.parametrize("store", ["sqlite", "files"])
def test_mlflow_goes_on_with_the_same_run(
    store: str, folder: RunFolder, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(
        "mlflow", reason="mlflow is not installed: pip install 'dataflow-rl[mlflow]'"
    )
    if store == "sqlite":
        pytest.importorskip("sqlalchemy", reason="MLflow opens no database without sqlalchemy")
    uri = {
        "sqlite": f"sqlite:///{folder.path.parent}/mlflow.db",
        "files": f"file://{folder.path.parent}/mlruns",
    }[store]
    (said,) = keep(MlflowTracker(uri="" if store == "sqlite" else uri)).finish()
    assert said == f"mlflow: mlflow ui --backend-store-uri {uri}"
    made_otherwise(folder)
    assert len(keep("mlflow").finish()) == 1
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("fakes")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == folder.path.name
    assert [
        (each.step, round(each.value, 4))
        for each in client.get_metric_history(run.info.run_id, "loss")
    ] == [
        (1, 1.0),
        (2, 0.5),
        (3, 0.3333),
        (4, 0.25),
        (5, 0.2),
        (5, 0.75),
        (6, 0.1667),
    ]
    assert round(run.data.metrics["loss"], 4) == 0.1667 and run.data.params["seed"] == "7"
    assert "prompts -> generator" in run.data.params["edges"]
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"])[0]["type"] == "table"
    assert {each.path for each in client.list_artifacts(run.info.run_id)} == {
        "graph.svg",
        "graph.json",
        "rollouts",
    }
    table = json.loads(
        Path(client.download_artifacts(run.info.run_id, "rollouts/step-000001.json")).read_text()
    )
    assert len(table["data"]) == 8 and "completion" in table["columns"]


@pytest.mark.filterwarnings("ignore")  # of MLflow's own libraries
def test_mlflow_has_one_run_of_one_whose_start_was_cut_short(
    folder: RunFolder, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip(
        "mlflow", reason="mlflow is not installed: pip install 'dataflow-rl[mlflow]'"
    )
    pytest.importorskip("sqlalchemy", reason="MLflow opens no database without sqlalchemy")
    uri, full, log = (
        f"sqlite:///{folder.path.parent}/mlflow.db",
        folder.path / "full",
        mlflow.MlflowClient.log_batch,
    )

    def refused(client: Any, *given: Any, **more: Any) -> Any:
        if full.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return log(client, *given, **more)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", refused)
    full.touch()
    kept = keep(MlflowTracker(uri=uri))
    kept.until(lambda: kept.first.fails == 1)
    full.unlink()
    kept.now += 10.0
    assert sum("failed in 'start'" in text for text in kept.finish()) == 1
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("fakes").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["seed"] == "7"
    assert [each.step for each in client.get_metric_history(run.info.run_id, "loss")] == [
        1,
        2,
        3,
        4,
        5,
    ]


def asked(port: int, host: str = "", path: str = "/metrics") -> tuple[int, str]:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        client.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
        answer = client.getresponse()
        return answer.status, answer.read().decode()
    finally:
        client.close()


def free_port() -> int:
    import socket

    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def test_prometheus_reads_the_newest_figures_of_this_machine_by_its_own_name(
    folder: RunFolder, keep: Keep
) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    crossed = {"sent": [3, 24, 900], "received": [2, 16, 600], "acknowledged": [1, 8, 300]}
    folder.note_activity(
        5.0,
        {"trainer": {"busy": 4.5, "rows_in": 60, "replicas": 1, "step": 5}},
        {"reward>trainer:prompts": crossed},
    )
    port = free_port()
    kept = keep(PrometheusTracker(port=port))
    kept.until(lambda: kept.first.well_since is not None and kept.in_call(""))
    status, text = asked(port)
    assert status == 200 and kept.said == [f"prometheus: http://127.0.0.1:{port}/metrics"]
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (loss,) = families["dataflow_loss"].samples
    assert loss.value == 0.2 and loss.labels == {"run": folder.path.name, "node": "trainer"}
    assert families["dataflow_node_busy_seconds"].type == "counter"
    assert families["dataflow_node_busy_seconds"].samples[0].value == 4.5
    assert families["dataflow_node_rows_in"].samples[0].name == "dataflow_node_rows_in_total"
    for at, unit in enumerate(("batches", "rows", "bytes")):
        samples = families[f"dataflow_edge_{unit}"].samples
        assert {each.labels["edge"] for each in samples} == {"reward>trainer:prompts"}
        assert {
            each.labels["counted"]: each.value for each in samples if each.name.endswith("_total")
        } == {end: counts[at] for end, counts in crossed.items()}
    assert asked(port, host="figures.example:80")[0] == 404 and asked(port, path="/else")[0] == 404
    assert asked(port, host=f"localhost:{port}")[0] == 200
    kept.finish()
    with pytest.raises(ConnectionRefusedError):
        asked(port)


def test_a_port_that_somebody_has_is_refused_before_the_run() -> None:
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        assert f"port {port} of this machine cannot be had" in (
            PrometheusTracker(port=port).missing() or ""
        )


@pytest.fixture
def otlp(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Any], list[int]]]:
    """A collector: what it was sent, and the statuses that it answers with, first to last; the last
    one stays.
    """
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter is not installed"
    )
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    taken: list[Any] = []
    statuses = [200]

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import gzip

            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
            if status == 200:
                request = ExportTraceServiceRequest()
                request.ParseFromString(body)
                taken.append((self.path, request))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield taken, statuses
    server.shutdown()
    server.server_close()
    thread.join(10)


def spans(taken: list[Any]) -> list[Any]:
    return [
        s
        for _, request in taken
        for r in request.resource_spans
        for scope in r.scope_spans
        for s in scope.spans
    ]


def test_opentelemetry_gets_a_trace_for_each_step(
    otlp: tuple[list[Any], list[int]], folder: RunFolder, keep: Keep
) -> None:
    taken, _ = otlp
    (said,) = keep("opentelemetry").finish()
    assert said.startswith("opentelemetry: spans go to http://127.0.0.1:")
    path, request = taken[0]
    assert path == "/v1/traces"
    resource = {
        each.key: each.value.string_value for each in request.resource_spans[0].resource.attributes
    }
    assert resource["rl.run.id"] == folder.path.name and resource["rl.system"] == "dataflow-rl"
    loops = [span for span in spans(taken) if span.name == "rl.loop"]
    assert len(loops) == STEPS and len({span.trace_id for span in loops}) == STEPS
    for loop in loops:
        inside = [span for span in spans(taken) if span.parent_span_id == loop.span_id]
        assert {span.name for span in inside} >= {"rl.train", "rl.sync"}
        assert all(
            loop.start_time_unix_nano <= s.start_time_unix_nano <= s.end_time_unix_nano
            for s in inside
        )
        assert all(span.end_time_unix_nano <= loop.end_time_unix_nano for span in inside)


def test_spans_of_groups_have_the_times_at_which_they_were_seen(
    otlp: tuple[list[Any], list[int]], folder: RunFolder
) -> None:
    taken, _ = otlp
    tracker = OpenTelemetryTracker()
    tracker.start(
        TrackedRun(name="r", folder=folder.path, graph={"name": "g"}, config={}, goes_on=False)
    )
    seen = {
        0: {"issued": 1.0, "generating": 2.0, "generated": 5.0, "scored": 6.0},
        1: {"issued": 3.0},
    }
    tracker.groups(
        StepGroups(
            node="trainer",
            step=3,
            source="prompts",
            began=0.5,
            at=9.0,
            seen=seen,
            dropped={1: "stale"},
            metrics={"loss": 0.5, "seconds_step": 2.0, "seconds_publish": 1.0},
        )
    )
    tracker.flush()
    tracker.finish("finished")
    found = [
        (s.name, s.start_time_unix_nano / 1e9, s.end_time_unix_nano / 1e9, s.status.message)
        for s in spans(taken)
    ]
    assert sorted(found) == [
        ("rl.loop", 0.5, 10.0, ""),
        ("rl.reward", 5.0, 6.0, ""),
        ("rl.sample", 2.0, 5.0, ""),
        ("rl.sample", 3.0, 7.0, "stale"),
        ("rl.sync", 9.0, 10.0, ""),
        ("rl.train", 7.0, 9.0, ""),
    ]
    sample = next(
        span for span in spans(taken) if span.name == "rl.sample" and not span.status.message
    )
    assert [(event.name, event.time_unix_nano / 1e9) for event in sample.events] == [
        ("rl.issued", 1.0)
    ]


def test_a_collector_that_takes_nothing_is_told_once_and_loses_nothing(
    otlp: tuple[list[Any], list[int]], folder: RunFolder, keep: Keep
) -> None:
    taken, statuses = otlp
    statuses[:] = [400, 400, 200]
    kept = keep("opentelemetry")
    kept.until(lambda: any("spans were not taken" in text for text in kept.said))
    kept.now += 10.0
    kept.until(lambda: kept.first.fails == 2)
    kept.now += 20.0
    kept.until(lambda: kept.first.well_since is not None)
    kept.finish()
    assert [text for text in kept.said if text.startswith("tracker")] == kept.said[1:2]
    loops = [s for s in spans(taken) if s.name == "rl.loop"]
    iterations = [
        next(a.value.int_value for a in s.attributes if a.key == "rl.loop.iteration") for s in loops
    ]
    assert iterations == [1, 2, 3, 4, 5]


def test_opentelemetry_without_an_endpoint_is_refused() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    assert "OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318" in (
        OpenTelemetryTracker().missing() or ""
    )


def test_the_core_imports_none_of_these_libraries() -> None:
    import subprocess
    import sys

    wanted = (
        "wandb",
        "tensorboard",
        "trackio",
        "mlflow",
        "prometheus_client",
        "opentelemetry",
        "torch",
    )
    program = (
        f"import sys, dataflow, dataflow.cli, dataflow.trackers; print([n for n in {wanted} if n in"
        " sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
