"""A folder whose every text means harm, and a server that goes away: what a browser makes of
both.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rigs.browsing.chromium import Browser, browser, program
from under_way import told

from dataflow.errors import RunError
from dataflow.folder.run_folder import RunFolder

pytestmark = pytest.mark.skipif(
    program() is None, reason="no Chromium here: apt-get install chromium-headless-shell"
)
STEPS, TOKEN = 6, "t0ken-of-a-test"
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
