"""Prometheus: the newest figures of a run at a port of this machine."""

import re
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any, ClassVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from dataflow.trackers.tracker import StepFigures, TrackedRun, Tracker
from dataflow.worker.kept_counts import UNITS

PORT = 9464
"""That OpenTelemetry's exporters to Prometheus have."""
HOST = "127.0.0.1"
NAMES = (HOST, "localhost", "[::1]")
ASK_S = 5.0
"""For a client to say what it wants."""


@dataclass(kw_only=True, eq=False)
class PrometheusTracker(Tracker):
    """Gauges of each node's newest line, and counters of what each node has done. On loopback
    alone: what is to be seen elsewhere, a Prometheus, an agent of it or a proxy on this machine
    collects here.
    """

    port: int = PORT
    """Where it is served, at /metrics, while the run goes on."""

    packages: ClassVar[Sequence[str]] = ("prometheus_client",)
    extra: ClassVar[str] = "prometheus"
    takes_activity: ClassVar[bool] = True
    rollouts_every: ClassVar[int] = 0

    def missing(self) -> str | None:
        """Also a port that somebody else has."""
        if not 0 < self.port < 65536:
            return (
                f"a port is a number from 1 to 65535, but --metrics-port is {self.port}; name"
                " another"
            )
        if (why := super().missing()) is not None:
            return why
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((HOST, self.port))
            except OSError as error:
                why = error.strerror or str(error)
                return (
                    f"port {self.port} of this machine cannot be had: {why}; name another with"
                    " --metrics-port"
                )
        return None

    def start(self, run: TrackedRun) -> str:
        """Serve."""
        import prometheus_client as client

        self._client: Any = client
        self._run = run.name
        self._registry = client.CollectorRegistry()
        self._registry.register(self)
        self._lock = threading.Lock()
        self._figures: dict[tuple[str, str], float] = {}
        self._done: dict[tuple[str, str], float] = {}
        self._crossed: dict[tuple[str, str], tuple[float, ...]] = {}
        app = client.make_wsgi_app(self._registry)
        self._server = make_server(HOST, self.port, _guarded(app), _Threads, _Quiet)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://{HOST}:{self.port}/metrics"

    def log(self, figures: StepFigures) -> None:
        """The newest line of a node."""
        with self._lock:
            for name, value in figures.numbers.items():
                self._figures[figures.node, name.rpartition("/")[2]] = value
            self._figures[figures.node, "step"] = figures.step

    def activity(self, nodes: Mapping[str, Mapping[str, float]]) -> None:
        """What nodes have done."""
        with self._lock:
            for node, activity in nodes.items():
                for name, value in activity.items():
                    if isinstance(value, int | float) and name not in ("step", "version"):
                        self._done[node, name] = float(value)

    def crossed(self, edges: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """What has crossed data edges."""
        with self._lock:
            for edge, ends in edges.items():
                for end, counts in ends.items():
                    self._crossed[edge, end] = tuple(map(float, counts))

    def finish(self, outcome: str) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterable[Any]:
        """For the library: what there is now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            figures, done, crossed = dict(self._figures), dict(self._done), dict(self._crossed)
        families: dict[str, Any] = {}
        kind: Any
        for (node, name), value in figures.items():
            key = f"dataflow_{_name(name)}"
            gauge = families.setdefault(
                key,
                GaugeMetricFamily(
                    key, f"{name} of a node's newest line in metrics.jsonl", labels=("run", "node")
                ),
            )
            gauge.add_metric((self._run, node), value)
        for (node, name), value in done.items():
            if name == "replicas":
                key, kind, text = "dataflow_node_replicas", GaugeMetricFamily, "replicas of a node"
            else:
                unit = (
                    "_seconds" if name in ("busy", "blocked", "idle", "waiting", "starved") else ""
                )
                key, kind, text = (
                    f"dataflow_node_{_name(name)}{unit}",
                    CounterMetricFamily,
                    f"{name} of a node so far",
                )
            family = families.setdefault(key, kind(key, text, labels=("run", "node")))
            family.add_metric((self._run, node), value)
        for at, unit in enumerate(UNITS):
            family = CounterMetricFamily(
                f"dataflow_edge_{unit}",
                f"{unit} on a data edge so far, as counted at one end of it",
                labels=("run", "edge", "counted"),
            )
            for (edge, end), counts in crossed.items():
                family.add_metric((self._run, edge, end), counts[at])
            if crossed:
                yield family
        yield from families.values()


class _Threads(ThreadingMixIn, WSGIServer):
    """A thread for each question."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that breaks off is no news."""


class _Quiet(WSGIRequestHandler):
    timeout = ASK_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a question comes every few seconds."""


def _guarded(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """Answers that go to callers by this machine's name alone: no page elsewhere reads them through
    a browser.
    """

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        host = str(environ.get("HTTP_HOST", ""))
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if name not in NAMES or environ.get("PATH_INFO") not in ("/metrics", "/metrics/"):
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b"/metrics, by this machine's own name, has the figures\n"]
        return app(environ, start)

    return answer


def _name(name: str) -> str:
    """A name with signs that Prometheus takes."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)
