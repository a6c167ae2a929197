"""Fixtures of the tests of the endpoint; they are left out where httpx is not installed."""

import importlib.util

import pytest

if importlib.util.find_spec("httpx") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    from serving_rig import byte_tokenizer

    return byte_tokenizer()


@pytest.fixture
def rows():
    """Rollouts that were recorded, as dicts."""
    return []


@pytest.fixture
def client_of(tokenizer, rows):
    """A client of a server whose engine answers with a text, or is the given one."""
    from serving_rig import scripted, service_of
    from starlette.testclient import TestClient

    from operators.serving.app import make_app

    opened = []

    def make(answer="hello world", app=None, **knobs):
        engine = (
            scripted(tokenizer, answer) if isinstance(answer, str) or callable(answer) else answer
        )
        service = service_of(engine, tokenizer, rows, **knobs)
        client = TestClient(make_app(service, **(app or {})), base_url="http://127.0.0.1")
        client.engine = engine
        opened.append(client.__enter__())
        return client

    yield make
    for client in opened:
        client.__exit__(None, None, None)
