"""A run folder as a run of fakes would leave it; and a server in a thread."""

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rigs.graphs import fake_graph
from six_steps import GROUPS, STEPS, rollouts

from dataflow import Devices, plan
from dataflow.errors import RunError
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import consumers, describe, graph_facts, plan_facts
from dataflow.live.command import PageAnswers
from dataflow.live.server import ClientLimits, PageServer
from dataflow.live.steering import Controls, Steering

TOKEN = "t0ken-of-a-test"
EXCHANGE = {
    "nbytes": 1 << 20,
    "full_bytes": 4 << 20,
    "seconds": 0.1,
    "committed_seconds": 0.75,
    "taken_seconds": 0.25,
    "pair_bytes": [[1 << 20]],
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Of a run that was killed after its sixth step, the line of the seventh torn."""
    made = RunFolder.create(tmp_path, "fakes", now=1.7e9)
    graph = fake_graph(max_staleness=2)
    planned = plan(graph, Devices(cpus=2))
    with Ledger.create(made.ledger, consumers(graph)) as ledger:
        describe(made, ledger, graph_facts(graph), plan_facts(graph, planned))
        for step in range(1, STEPS + 1):
            groups = range((step - 1) * GROUPS, step * GROUPS)
            ledger.issue("prompts", [(group, f"p{group}") for group in groups])
            made.rollouts_of().write(step, rollouts(step))
            ledger.commit_step("trainer", step, version=step, source="prompts", trained=groups)
            line = {
                "step": step,
                "node": "trainer",
                "loss": 1.0 / step,
                "reward_mean": step * 0.1,
                "dropped": {"stale": 0},
                "staleness_mean": 1.0,
                "staleness_max": 2,
                "kl": None,
                "staleness_generating_mean": 0.75,
                "staleness_generating_max": 2,
                "staleness_waiting_mean": 0.25,
                "staleness_waiting_max": 1,
                "weights_sent": {"generator-0": EXCHANGE | {"version": step - 1}},
            }
            made.append_metrics(line)
    graph.draw(made.graph_svg)
    with made.metrics.open("a") as file:
        file.write('{"step": 7, "node": "trai')
    return made


def over(folder: RunFolder, patience_s: float) -> Mapping[str, Any]:
    """Asks the scheduler of a run that has none."""
    raise RunError("it is over")


@dataclass
class Served:
    """A server, and what a client does with it."""

    port: int
    waits: ClientLimits
    stop: Callable[[], None]
    """Ends it."""

    def get(
        self,
        path: str,
        headers: Mapping[str, str] | None = None,
        method: str = "GET",
        token: str = TOKEN,
        body: bytes | None = None,
    ) -> tuple[int, bytes, dict[str, str]]:
        """Status, body, and headers in lower case."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            client.request(method, f"/{token}/{path}", body=body, headers=dict(headers or {}))
            answer = client.getresponse()
            return (
                answer.status,
                answer.read(),
                {name.lower(): value for name, value in answer.getheaders()},
            )
        finally:
            client.close()

    def steer(
        self, request: Any, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Send a request as the page does; status and answer. request: JSON, or bytes as they
        are.
        """
        sent = {
            "Content-Type": "application/json",
            "Origin": f"http://127.0.0.1:{self.port}",
            **(headers or {}),
        }
        body = request if isinstance(request, bytes) else json.dumps(request).encode()
        status, answer, _ = self.get("api/steer", sent, "POST", body=body)
        return status, json.loads(answer)

    def json(self, path: str) -> Any:
        """What an address below api/ says."""
        status, body, _ = self.get(f"api/{path}")
        assert status == 200, body
        return json.loads(body)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Starts servers of run folders, which end with the test."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    made: list[PageServer] = []

    def start(
        folders: Sequence[RunFolder],
        ask: Any = over,
        limits: ClientLimits | None = None,
        controls: Controls | None = None,
        port: int = 0,
    ) -> Served:
        answers = PageAnswers(
            folders, ask, Steering(controls, "somebody@here") if controls else None
        )
        server = PageServer(answers, TOKEN, limits, steer=answers.steer if controls else None)
        asyncio.run_coroutine_threadsafe(server.start(port), loop).result(10)
        made.append(server)
        return Served(server.port, limits or ClientLimits(), lambda: stop(server))

    def stop(server: PageServer) -> None:
        made.remove(server)
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)

    yield start
    for server in list(made):
        stop(server)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()
