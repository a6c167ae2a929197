"""Addresses of environments' servers: what is none is refused, and nobody there when a run begins
ends it, named.
"""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rigs.worlds.served_alone import free_port

from dataflow import Graph, GraphError, Model, RunError, run
from dataflow.limits import Limits
from dataflow.runtime import Context
from operators import Generator, Trainer
from operators.credit import advantage
from operators.environments import environment
from operators.environments.declaration import absence
from operators.losses import aipo
from transport.life import Life

pytest.importorskip("httpx", reason="httpx is not installed; pip install dataflow-rl[nemo-gym]")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made.getsockname()[1]


@pytest.mark.parametrize(
    "place", ["localhost:8000", "ws://127.0.0.1:8000", "http://:8000", "http://a:port", "a"]
)
def test_what_is_no_address_of_such_a_server_is_refused(place: str) -> None:
    with pytest.raises(
        GraphError,
        match=r"is asked at an address, but got .*; write one of http://HOST:PORT, https",
    ):
        environment(f"nemo-gym:{place}")


def test_whoever_is_there_is_taken_for_the_server(listener: int) -> None:
    assert absence("a world", f"http://127.0.0.1:{listener}/there") is None
    assert absence("a world", f"ws://127.0.0.1:{listener}") is None


def test_nobody_at_an_address_is_named_with_what_to_do() -> None:
    port = free_port()
    assert (
        absence("a world", f"http://127.0.0.1:{port}")
        == "the server of environment 'a world' is not there; found nobody at '127.0.0.1', port"
        f" {port} (Connection refused); start it before the run, or correct the address"
    )


def test_a_name_that_no_machine_has_is_said_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    said = str(absence("a world", "ws://hots:8000"))
    assert (
        "found no machine by the name 'hots' (Name or service not known); correct the address"
        in said
    )


def test_nothing_is_said_of_a_server_that_is_slow_or_asked_through_a_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(*_: Any, **__: Any) -> Any:
        raise TimeoutError

    address = f"http://127.0.0.1:{free_port()}"
    with monkeypatch.context() as patched:
        patched.setattr(socket, "create_connection", late)
        assert absence("a world", address) is None
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert absence("a world", address) is None
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert absence("a world", address) is not None


ROWS = [{"responses_create_params": {"input": "go"}}] * 8


def graph(policy: Path, port: int) -> Graph:
    g, model = Graph("away"), Model(str(policy))
    generator, trainer = (
        Generator(model, group_size=2, max_tokens=4, slots=8),
        Trainer(model, loss=aipo, lr=1e-3),
    )
    world = environment(f"nemo-gym:http://127.0.0.1:{port}")
    trainer(advantage(world(generator, g.source(world.tasks(ROWS)))))
    g.feedback(trainer.weights, generator, max_staleness=1)
    return g


@pytest.mark.usefixtures("forked", "one_core")
@pytest.mark.timeout(120)
def test_a_run_whose_server_is_not_there_ends_at_once_and_says_so(
    policy: Path, tmp_path: Path
) -> None:
    port = free_port()
    with pytest.raises(
        RunError, match=rf"'reward': the server of environment 'nemo-gym:.*nobody at .*{port}"
    ):
        run(graph(policy, port), steps=1, runs=tmp_path, quiet=True, limits=Limits(stop_s=2.0))


def test_a_worker_that_is_started_again_waits_for_a_server_that_is_away(policy: Path) -> None:
    """As both may have been killed; who is away for too long is the failure of rollouts then."""
    world = graph(policy, free_port()).operators["reward"]
    with pytest.raises(GraphError, match="is not there"):
        world.build(Context(node="reward"))
    runtime = world.build(Context(node="reward", life=Life(attempt=1)))
    runtime.close()
