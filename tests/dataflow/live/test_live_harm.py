"""A folder whose every text means harm, and a server that goes away: what a browser makes of
both.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rigs.browsing.chromium import Browser, browser, program
from under_way import told

from dataflow.errors import RunError
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import described

pytestmark = pytest.mark.skipif(
    program() is None, reason="no Chromium here: apt-get install chromium-headless-shell"
)


STEPS, TOKEN = 6, "t0ken-of-a-test"


HARM = "<img src=x onerror=\"document.title='harmed'\"><script>document.title='harmed'</script>"


SIGNS = "\x1b[2J\x1b]0;harmed\x07\u202egnorw\u202c\u200b\x00"


ROWS = "document.querySelectorAll('#rows tbody tr').length"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


def opened(window: Browser, port: int, token: str = TOKEN) -> Browser:
    window.look_like(1280, 900)
    window.open(f"http://127.0.0.1:{port}/{token}/")
    return window


def nothing_happened(page: Browser) -> None:
    """No program of the folder ran, and nothing of it is markup."""
    assert page.ask("document.title").endswith("· dataflow live") and not page.troubles
    assert (
        page.ask(
            "document.querySelectorAll('img, iframe, object, embed, body script, style,"
            " [onerror]').length"
        )
        == 0
    )
    shown = page.ask("document.documentElement.innerText")
    assert not set("\x1b\x07\u202e\u202c\u200b\x00") & set(shown)


def test_texts_that_mean_harm_are_shown_as_text(
    folder: RunFolder, serve: Callable[..., Any], window: Browser
) -> None:
    page = opened(window, serve([folder]).port)
    page.wait(ROWS)
    told = page.ask("document.getElementById('rows').textContent")
    assert "<script>" in told and "ESC[31mred" in told and "RLO" in told
    for row in range(3):
        page.ask(f"location.hash = '#run=0&rollout=step//{STEPS}/{row}'")
        page.wait(f"document.querySelector('.member.this a')?.hash.endsWith('/{STEPS}/{row}')")
        page.wait("document.querySelectorAll('.tokens span').length >= 4")
        nothing_happened(page)
    before = page.ask("document.querySelectorAll('#rollout .text')[1].textContent.length")
    page.ask(
        "[...document.querySelectorAll('#rollout button')].find(e => e.textContent.startsWith('show"
        " more')).click()"
    )
    assert before == 4000, "of a line of a million signs"
    page.wait("document.querySelectorAll('#rollout .text')[1].textContent.length == 20000")
    page.press("Escape")
    page.wait("!document.querySelector('#rollout').open")


def test_names_faults_and_requests_that_mean_harm_are_shown_as_text(
    folder: RunFolder, serve: Callable[..., Any], window: Browser
) -> None:
    harm = HARM + SIGNS
    graph, config = described(folder)
    nodes = [{**node, "operator": harm, "knobs": {harm: harm}} for node in graph["nodes"]]
    with Ledger.open(folder.ledger) as ledger:
        ledger.set_facts(
            {
                "graph": {**graph, "name": harm, "nodes": nodes},
                "config": {**config, "hosts": {"generator": [harm]}},
            }
        )
    fault = {"at": 4e9, "worker": harm, "cause": harm, "attempt": 0, "noticed_s": 0.1}
    (folder.path / "faults.jsonl").write_text(json.dumps(fault) + "\n")
    request = {"at": 1.0, "step": 3, "by": harm, "request": harm, "answer": harm, "refused": True}
    (folder.path / "requests.jsonl").write_text(json.dumps(request) + "\n")
    with folder.metrics.open("a") as file:
        file.write("\n")
    folder.append_metrics({"step": STEPS, "node": "trainer", harm: 1.0, "loss": 0.1})
    page = opened(window, serve([folder]).port)
    page.wait(
        f"{ROWS} && document.querySelectorAll('.chart path.a').length &&"
        " !document.getElementById('requests').hidden"
    )
    page.ask("document.querySelectorAll('#stage .node')[1].dispatchEvent(new MouseEvent('click'))")
    assert "<img src=x" in page.ask("document.getElementById('node').textContent")
    page.ask(
        "(e => { e.value = 'onerror'; e.dispatchEvent(new Event('change'))"
        " })(document.getElementById('find'))"
    )
    page.wait(
        "[...document.querySelectorAll('.chart .name')].some(e => e.textContent.includes('<img'))"
    )
    for name in ("fault-rows", "request-rows"):
        assert "<script>" in page.ask(f"document.getElementById('{name}').textContent")
    nothing_happened(page)


def test_without_the_token_a_reader_is_told_in_a_sentence(
    folder: RunFolder, serve: Callable[..., Any], window: Browser
) -> None:
    page = opened(window, serve([folder]).port, token="another")
    assert "take the one that dataflow live printed" in page.ask("document.body.textContent")
    assert "fakes" not in page.ask("document.documentElement.outerHTML")
    assert all("403" in each for each in page.troubles)


def test_another_site_in_the_same_browser_gets_nothing(
    folder: RunFolder, serve: Callable[..., Any], window: Browser
) -> None:
    here, there = serve([folder]).port, serve([folder]).port
    page = opened(window, there)
    page.wait(ROWS)
    fetched = f"fetch('http://127.0.0.1:{here}/{TOKEN}/api/runs')"
    outcome = page.ask(f"{fetched}.then(() => 'read').catch(() => 'refused')")
    assert outcome == "refused", "by the policy of the page"
    page.do("Page.setBypassCSP", enabled=True)
    try:
        page = opened(window, there)
        page.wait(ROWS)
        outcome = page.ask(f"{fetched}.then(() => 'read').catch(() => 'refused')")
        assert outcome == "refused", "by the server, which names no other origin"
    finally:
        page.do("Page.setBypassCSP", enabled=False)


def test_a_folder_that_is_gone_and_comes_back_is_told(
    folder: RunFolder, serve: Callable[..., Any], window: Browser
) -> None:
    page = opened(window, serve([folder]).port)
    page.wait(ROWS)
    away = folder.path.with_name("away")
    shutil.move(folder.path, away)
    page.wait(
        "document.getElementById('trouble').textContent.includes('is not there any more')", 40
    )
    assert page.ask(ROWS), "what was seen stays"
    shutil.move(away, folder.path)
    page.wait("document.getElementById('trouble').hidden", 40)


def test_a_server_that_is_gone_is_told_and_what_was_seen_stays(
    folder: RunFolder, serve: Callable[..., Any], window: Browser
) -> None:
    served = serve([folder])
    page = opened(window, served.port)
    page.wait(f"{ROWS} && document.querySelectorAll('.chart path.a').length")
    served.stop()
    page.wait(
        "document.getElementById('trouble').textContent.includes('the page goes on asking')", 60
    )
    assert "dataflow live was ended" in page.ask("document.getElementById('trouble').textContent")
    assert page.ask(ROWS)
    serve([folder], port=served.port)
    page.wait("document.getElementById('trouble').hidden", 60)


def test_a_run_that_ends_while_it_is_watched_is_told(
    folder: RunFolder, serve: Callable[..., Any], window: Browser
) -> None:
    over: list[bool] = []

    def ask(where: RunFolder, patience_s: float) -> Any:
        if over:
            raise RunError("it is over")
        return told(10, 1.0)

    page = opened(window, serve([folder], ask=ask).port)
    page.wait("document.getElementById('state').textContent.startsWith('under way')")
    over.append(True)
    folder.write_json("times.json", {"outcome": "finished", "seconds": 4.0})
    page.wait("document.getElementById('state').textContent == 'finished'")
    assert "The run has finished" in page.ask("document.getElementById('sentence').textContent")
    page.ask("document.getElementById('trouble').hidden || null")
