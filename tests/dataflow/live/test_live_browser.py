"""The page in a browser: driven as a reader would, on a folder whose texts mean harm."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser, browser, program
from under_way import told

from dataflow.errors import RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.live.steering import Controls

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(program() is None, reason="no Chromium here: apt-get install chromium-headless-shell"),
]
STEPS = 6


@pytest.fixture
def page(folder: RunFolder, serve: Callable[..., Any], tmp_path: Path) -> Iterator[Browser]:
    served = serve([folder, folder])
    with browser(tmp_path / "browser") as made:
        made.look_like(1280, 900)
        made.open(f"http://127.0.0.1:{served.port}/t0ken-of-a-test/")
        made.wait(
            "document.querySelectorAll('.chart').length > 2 && document.querySelectorAll('#rows tbody tr').length"
        )
        yield made
        assert not made.troubles
        assert all(url.startswith(f"http://127.0.0.1:{served.port}/t0ken-of-a-test/") for url in made.called)


def enter(page: Browser, name: str, value: str) -> None:
    page.ask(
        f"(e => {{ e.value = '{value}'; e.dispatchEvent(new Event('change')) }})(document.getElementById('{name}'))"
    )


def click(page: Browser, which: str, text: str) -> None:
    page.ask(f"[...document.querySelectorAll('{which}')].find(e => e.textContent.startsWith('{text}')).click()")


def test_the_graph_the_series_and_the_rollouts_are_there(page: Browser) -> None:
    assert page.ask("document.querySelectorAll('#stage .node').length") == 4
    assert page.ask("document.querySelectorAll('#nodes tbody tr').length") == 4
    assert "not finished" in page.ask("document.getElementById('state').textContent")
    assert "not measured" in page.ask("document.getElementById('edges').textContent")
    page.ask("document.querySelectorAll('#stage .node')[1].focus()")
    page.press("Enter")
    assert "generator" in page.wait(
        "!document.getElementById('node').hidden && document.getElementById('node').textContent"
    )
    page.ask("document.querySelector('.chart svg').focus()")
    page.press("Home")
    page.wait("document.getElementById('readout').textContent.includes('at step 1: 0.1')")
    page.ask(
        "(e => { e.value = 'staleness_max'; e.dispatchEvent(new Event('change')) })(document.getElementById('find'))"
    )
    page.wait("[...document.querySelectorAll('.chart .name')].some(e => e.textContent == 'staleness_max')")
    enter(page, "beside", "1")
    page.wait("document.querySelectorAll('.chart path.b').length > 2")
    assert "fakes" in page.ask("document.getElementById('key-b').textContent")


def test_texts_that_mean_harm_are_shown_as_text(page: Browser) -> None:
    told = page.ask("document.getElementById('rows').textContent")
    assert "<script>" in told and "ESC[31mred" in told and "RLO" in told and "\x1b" not in told and "\u202e" not in told
    for row in range(3):
        page.ask(f"location.hash = '#run=0&rollout=step//{STEPS}/{row}'")
        page.wait(f"document.querySelector('.member.this a')?.hash.endsWith('/{STEPS}/{row}')")
        page.wait("document.querySelectorAll('.tokens span').length >= 4")
    assert page.ask("document.querySelector('#rollout').open && document.title").startswith("fakes")
    assert page.ask("document.querySelectorAll('#rollout img, #rollout script').length") == 0
    before = page.ask("document.querySelectorAll('#rollout .text')[1].textContent.length")
    page.ask(
        "[...document.querySelectorAll('#rollout button')].find(e => e.textContent.startsWith('show more')).click()"
    )
    assert before == 4000
    page.wait("document.querySelectorAll('#rollout .text')[1].textContent.length == 20000")
    page.press("Escape")
    page.wait("!document.querySelector('#rollout').open")


def test_a_search_and_an_order_change_the_table(page: Browser) -> None:
    page.ask(
        "document.getElementById('search').value = 'answer 3'; document.getElementById('question').requestSubmit()"
    )
    page.wait("document.querySelectorAll('#rows tbody tr').length == 6")
    click(page, "#rows th button", "reward")
    page.wait("document.querySelector('#rows th[aria-sort=descending]')?.textContent == 'reward ↓'")
    assert page.ask("document.querySelectorAll('#rows tbody tr')[0].textContent").count("answer 3 5") == 1


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_nothing_is_wider_than_the_screen(page: Browser, width: int, dark: bool) -> None:
    page.look_like(width, 844, dark=dark)
    page.wait(f"document.documentElement.scrollWidth <= {width}")
    colour = page.ask("getComputedStyle(document.body).backgroundColor")
    assert colour == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")


def test_a_page_that_may_steer_asks_once_and_tells_what_came_of_it(
    folder: RunFolder, serve: Callable[..., Any], tmp_path: Path
) -> None:
    calls: list[Any] = []

    def scale(run: RunFolder, wishes: Any, by: str) -> str:
        calls.append(dict(wishes))
        return "generator: 3 live"

    def stop(run: RunFolder, by: str) -> str:
        raise RunError("it <b>ends</b> already")

    controls = Controls(
        stop=stop, scale=scale, swap=lambda *_: "swapped", set_knob=lambda *_: "set", checkpoint=lambda *_: "kept"
    )  # fmt: skip
    served = serve([folder], ask=lambda *_: told(10, 1.0), controls=controls)
    with browser(tmp_path / "browser") as page:
        page.look_like(1280, 900)
        page.open(f"http://127.0.0.1:{served.port}/t0ken-of-a-test/")
        page.wait("!document.getElementById('stop-run').disabled")
        page.ask("document.querySelectorAll('#stage .node')[1].focus()")
        page.press("Enter")
        page.wait("!document.getElementById('steer-node').hidden")
        page.ask("document.querySelector('#steer-node input').value = 3")
        page.ask("document.querySelector('#steer-node form').requestSubmit()")
        assert "3 replicas" in page.wait(
            "document.getElementById('confirm').open && document.getElementById('confirm-title').textContent"
        )
        assert not calls, "it asks first"
        page.ask("document.getElementById('confirm-do').click(); document.getElementById('confirm-do').click()")
        page.wait("document.getElementById('confirm-answer').textContent == 'generator: 3 live'")
        page.ask("document.getElementById('confirm-cancel').click()")
        assert calls == [{"generator": 3}]
        page.ask("document.getElementById('stop-run').click()")
        page.ask("document.getElementById('confirm-cancel').click()")
        page.ask("document.getElementById('stop-run').click()")
        page.ask("document.getElementById('confirm-do').click()")
        page.wait("document.getElementById('confirm-answer').textContent == 'it <b>ends</b> already'")
        assert not page.troubles or all("409" in each for each in page.troubles)
