"""The page's server from outside: what it says, to whom, how long it waits, and that it leaves a
run's folder alone.
"""

import asyncio
import contextlib
import gc
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.live.rollouts import ROWS
from dataflow.live.server import ClientLimits, PageServer

Serve = Callable[..., Any]


STEPS = 6


PAGE = Path(__file__).parents[3] / "dataflow" / "live" / "page"


def contents(folder: RunFolder) -> dict[str, tuple[int, bytes]]:
    """All files but those that SQLite keeps beside a ledger for whoever reads it."""
    files = (
        path
        for path in folder.path.rglob("*")
        if path.is_file() and not path.name.startswith("ledger.db-")
    )
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_what_the_page_asks_for_is_answered_and_the_folder_stays_as_it_was(
    folder: RunFolder, serve: Serve
) -> None:
    before = contents(folder)
    page = serve([folder, folder])
    assert [run["name"] for run in page.json("runs")["runs"]] == [folder.path.name] * 2
    graph = page.json("graph?run=1")
    assert {node["name"] for node in graph["nodes"]} >= {
        "prompts",
        "generator",
        "reward",
        "trainer",
    }
    drawn = json.dumps(graph["picture"])
    assert all(f'"data-edge": "{at}"' in drawn for at in range(len(graph["edges"])))
    now = page.json("now")
    assert (
        now["state"] == "not finished"
        and now["newest"]["trainer"]["step"] == STEPS
        and now["read"] == 1
    )
    names = page.json("names")["series"]
    assert [each["label"] for each in names if each["first"]][:2] == ["reward_mean", "loss"]
    assert page.json("series?key=trainer/loss&key=no")["series"]["trainer/loss"]["steps"] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert page.json("marks")["faults"] == []
    table = page.json("rollouts?sort=reward")
    assert (
        table["count"] == 36
        and table["rows"][0]["reward"] == 5.0
        and table["columns"] == ["reward"]
    )
    assert table["rows"][-1]["reward"] == "nan" and table["rows"][0]["staleness"] in (0, 1)
    assert page.json("rollouts?search=TOOL&upto=4")["count"] == 4, "one error in each of four steps"
    assert page.json("rollouts?search=answer%202&upto=3")["steps"] == [1, 3]
    for name in ("", "index.html", *(path.name for path in PAGE.iterdir()), "picture.css"):
        status, body, headers = page.get(name)
        assert status == 200 and body and "default-src 'none'" in headers["content-security-policy"]
    assert contents(folder) == before


def test_texts_that_mean_harm_come_as_json_and_long_ones_in_parts(
    folder: RunFolder, serve: Serve
) -> None:
    page = serve([folder])
    status, body, headers = page.get("api/rollouts?sort=row&order=up&upto=6")
    assert (
        status == 200
        and headers["content-type"].startswith("application/json")
        and len(body) < 60_000
    )
    assert headers["x-content-type-options"] == "nosniff" and b"\x1b" not in body
    one = page.json(f"rollout?kind=step&step={STEPS}&row=2")
    assert (
        one["texts"]["completion"]["of"] == 1_000_000
        and len(one["texts"]["completion"]["text"]) == 4000
    )
    assert one["group_count"] == 3 and len(one["group"][2]["completion"]) <= 601
    assert one["columns"]["reward"] == "2" and one["has_ratio"]
    more = page.json(f"text?kind=step&step={STEPS}&row=2&field=completion&from=999990")
    assert more == {"text": "x" * 10, "begin": 999_990, "of": 1_000_000}
    assert page.json(f"text?kind=step&step={STEPS}&row=2&field=error") is None
    tokens = page.json(f"tokens?kind=step&step={STEPS}&row=0&colour=logprobs")
    assert tokens["chosen"] == [False, True, True, True] and tokens["least"] == -2.0
    ratio = page.json(
        f"tokens?kind=step&step={STEPS}&row=0&colour=importance ratio".replace(" ", "%20")
    )
    assert ratio["numbers"] == pytest.approx([1.0, 1.0, 2.718281828, 1.0])


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("../config.json", 404),
        ("..%2fconfig.json", 404),
        ("%2e%2e/config.json", 404),
        ("/etc/passwd", 404),
        ("page.css/../../cli.py", 404),
        ("api/../now", 404),
        ("answers.py", 404),
        ("api/rollouts?node=..", 404),
        ("api/rollouts?node=../../x&kind=step", 404),
        ("api/rollouts?kind=../step", 404),
        ("api/secrets", 404),
        ("api/rollout?kind=step&step=../../6&row=0", 400),
        ("api/rollout?kind=step&step=6&row=99", 404),
        ("api/rollout?kind=step&step=6&row=-1", 404),
        ("api/now?run=2", 404),
        ("api/now?run=-1", 404),
        ("api/now?run=one", 400),
        ("api/now?run=" + "9" * 30, 400),
        ("api/series?points=1e9", 400),
        ("api/series?from=x", 400),
        ("api/text?kind=step&step=6&row=0&field=../x", 404),
        ("trace", 404),
        ("api/tokens?kind=step&step=6&row=0&colour=prompt", 404),
        ("api/now?" + "a=1&" * 200, 400),
        ("api/rollout?kind=step&step=7&row=0", 404),
    ],
)
def test_no_address_leads_out_of_the_page_and_its_runs(
    folder: RunFolder, serve: Serve, path: str, status: int
) -> None:
    found, body, headers = serve([folder]).get(path)
    assert found == status and json.loads(body)["error"] and b"root:" not in body
    assert headers["content-security-policy"] and headers["referrer-policy"] == "no-referrer"


def test_without_the_token_or_from_another_site_there_is_one_sentence(
    folder: RunFolder, serve: Serve
) -> None:
    page = serve([folder])
    refused = [
        page.get("api/runs", token="another"),
        page.get("", token=""),
        page.get("api/runs", {"Host": "evil.example"}),
        page.get("api/runs", {"Origin": "http://evil.example"}),
        page.get("api/runs", {"Sec-Fetch-Site": "cross-site"}),
    ]
    for status, body, headers in refused:
        assert status == 403 and list(json.loads(body)) == ["error"] and b"fakes" not in body
        assert (
            "access-control-allow-origin" not in headers
            and "frame-ancestors 'none'" in headers["content-security-policy"]
        )
    assert page.get("api/runs", method="POST")[0] == 405
    assert page.get("page.js", method="HEAD")[:2] == (200, b"")


def test_it_listens_on_this_machine_alone(folder: RunFolder, serve: Serve) -> None:
    port = serve([folder]).port
    with socket.socket() as other:
        other.settimeout(2)
        assert other.connect_ex(("127.0.0.1", port)) == 0
    with socket.socket() as other:
        other.bind(("127.0.0.2", port))  # which it could not be if the server had every address


def test_slow_and_stuck_clients_hold_up_nobody_and_are_let_go(
    folder: RunFolder, serve: Serve
) -> None:
    page = serve([folder], limits=ClientLimits(ask_s=0.4, take_s=0.4, connections=40))
    stuck = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(30)]
    for number, client in enumerate(stuck):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.sendall([b"", b"GET /t0ken", b"GET /" + b"x" * 9000, b"\x00" * 300][number % 4])
    began = time.monotonic()
    assert page.json("names")["series"] and time.monotonic() - began < 5
    for client in stuck:
        client.settimeout(5)
        while client.recv(1 << 10):
            pass  # a sentence to the one that sent no request
        client.close()


@pytest.mark.parametrize("turns", range(6))
def test_a_client_that_was_just_accepted_is_let_go_with_the_server(turns: int) -> None:
    """Its socket stayed open where it was cancelled before it was served, or the loop ended before
    it was closed.
    """
    loop, server = asyncio.new_event_loop(), PageServer(lambda address: Response(), "token")

    async def visit() -> socket.socket:
        await server.start()
        client = socket.create_connection(("127.0.0.1", server.port))
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.close()
        return client

    with loop.run_until_complete(visit()) as client:
        loop.close()
        gc.collect()  # what is open still warns, and a warning is an error
        client.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(10) == b""


def test_whoever_has_no_token_keeps_nobody_out(folder: RunFolder, serve: Serve) -> None:
    """Any user of this machine may connect, as often as he likes, and say nothing."""
    page = serve([folder], limits=ClientLimits(connections=8))
    held = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(40)]
    for client in held:
        client.sendall(b"GET /")
    assert [page.get("api/runs")[0] for _ in range(3)] == [200] * 3
    for client in held[:30]:
        client.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(10) == b"", "who came first made room"
    for client in held:
        client.close()


def test_of_too_many_clients_with_the_token_the_last_are_turned_away(
    folder: RunFolder, serve: Serve
) -> None:
    folder.trace.write_bytes(b" " * (24 << 20))
    page = serve([folder], limits=ClientLimits(connections=3))
    held = []
    for _ in range(3):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", page.port))
        client.sendall(b"GET /t0ken-of-a-test/trace HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(4) == b"HTTP"
        held.append(client)
    assert page.get("api/runs")[0] == 503
    for client in held:
        client.close()
    deadline = time.monotonic() + 5
    while (status := page.get("api/runs")[0]) != 200 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert status == 200


def test_a_client_that_takes_nothing_of_a_large_answer_is_let_go(
    folder: RunFolder, serve: Serve
) -> None:
    folder.trace.write_bytes(b" " * (24 << 20))
    page = serve([folder], limits=ClientLimits(take_s=0.5))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", page.port))
        client.sendall(b"GET /t0ken-of-a-test/trace HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert page.json("runs"), "others are answered meanwhile"
        time.sleep(1.0)
        client.settimeout(5)
        taken = 0
        try:
            while part := client.recv(1 << 20):
                taken += len(part)
        except ConnectionResetError:
            pass
        assert taken < 24 << 20
    status, body, headers = page.get("trace")
    assert (
        status == 200 and len(body) == 24 << 20 and "attachment" in headers["content-disposition"]
    )


def test_a_damaged_file_of_rollouts_is_told_and_the_others_are_shown(
    folder: RunFolder, serve: Serve
) -> None:
    folder.rollouts_of().step_file(5).write_bytes(b"ARROW1\0\0 no more")
    folder.rollouts_of().step_file(3).unlink()
    folder.ledger.write_bytes(b"no ledger")
    folder.graph_svg.write_text("<svg")
    page = serve([folder])
    found = page.json("rollouts")
    assert found["count"] == 24 and len(found["problems"]) == 1 and "step 5" in found["problems"][0]
    assert page.get("api/rollout?kind=step&step=5&row=0")[0] == 409
    assert page.json("graph")["picture"] is None and page.json("graph")["nodes"], "from graph.json"
    assert page.json("now")["state"] == "not finished" and page.json("marks")["faults"] == []


def test_a_page_of_rows_is_bounded_however_many_steps_there_are(
    folder: RunFolder, serve: Serve
) -> None:
    first = folder.rollouts_of().step_file(1).read_bytes()
    with Ledger.open(folder.ledger) as ledger:
        for step in range(7, 60):
            folder.rollouts_of().step_file(step).write_bytes(first)
            ledger.issue("prompts", [(2 * step - 2, "p"), (2 * step - 1, "p")])
            ledger.commit_step(
                "trainer",
                step,
                version=step,
                source="prompts",
                trained=[2 * step - 2, 2 * step - 1],
            )
    found = serve([folder]).json("rollouts?page=1")
    assert (
        len(found["rows"]) == ROWS
        and found["steps"] == [36, 59]
        and found["older"] == 35
        and found["newest"] == 59
    )


def test_a_step_that_was_taken_back_is_not_shown(folder: RunFolder, serve: Serve) -> None:
    with Ledger.open(folder.ledger) as ledger:
        ledger.roll_back_to(4, "trainer")
    page = serve([folder])
    found = page.json("rollouts")
    assert found["newest"] == 4 and found["steps"] == [1, 4] and found["count"] == 24
    status, body, _ = page.get("api/rollout?kind=step&step=5&row=0")
    assert status == 404 and b"not yet" in body
    assert page.get("api/rollout?kind=step&step=4&row=0")[0] == 200


def test_the_page_makes_no_markup_of_what_it_is_told_and_asks_nobody_else() -> None:
    for path in PAGE.iterdir():
        text = path.read_text()
        for harm in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
            "localStorage",
            "onerror=",
            "setAttribute('style'",
        ):
            assert harm not in text, f"{path.name}: {harm}"
        assert "https:" not in text and text.count("http:") == text.count(
            "http://www.w3.org/2000/svg"
        ), path.name
    assert (
        "style=" not in (PAGE / "index.html").read_text()
        and "<script>" not in (PAGE / "index.html").read_text()
    )
