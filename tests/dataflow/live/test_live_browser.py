"""The page in a browser: driven as a reader would, on a folder of a run that is over."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rigs.browsing.chromium import Browser, browser, program
from six_steps import rollouts
from under_way import told

from dataflow.errors import RunError
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.live.steering import Controls

pytestmark = pytest.mark.skipif(
    program() is None, reason="no Chromium here: apt-get install chromium-headless-shell"
)


STEPS = 6


TOKEN = "t0ken-of-a-test"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


def filled(window: Browser, port: int, rest: str = "") -> Browser:
    """The page, once it shows charts and rollouts."""
    window.look_like(1280, 900)
    window.open(f"http://127.0.0.1:{port}/{TOKEN}/{rest}")
    window.wait("document.querySelectorAll('.chart path.a').length > 2")
    window.wait(
        "document.querySelectorAll('#rows tbody tr').length && document.querySelectorAll('#nodes"
        " td').length"
    )
    return window


@pytest.fixture
def page(folder: RunFolder, serve: Callable[..., Any], window: Browser) -> Iterator[Browser]:
    served = serve([folder, folder])
    yield filled(window, served.port)
    assert not window.troubles
    assert all(url.startswith(f"http://127.0.0.1:{served.port}/{TOKEN}/") for url in window.called)


def enter(page: Browser, name: str, value: str) -> None:
    page.ask(
        f"(e => {{ e.value = '{value}'; e.dispatchEvent(new Event('change'))"
        f" }})(document.getElementById('{name}'))"
    )


def click(page: Browser, which: str, text: str) -> None:
    page.ask(
        f"[...document.querySelectorAll('{which}')].find(e =>"
        f" e.textContent.startsWith('{text}')).click()"
    )


def enter_colour(page: Browser, name: str) -> None:
    page.ask(
        f"(e => {{ e.value = '{name}'; e.dispatchEvent(new Event('change')) }})"
        "(document.querySelector('#rollout select'))"
    )


def text_of(page: Browser, name: str) -> str:
    return str(page.ask(f"document.getElementById('{name}').textContent"))


def test_the_graph_the_series_and_the_rollouts_are_there(page: Browser) -> None:
    assert page.ask("document.querySelectorAll('#stage .node').length") == 4
    assert page.ask("document.querySelectorAll('#nodes tbody tr').length") == 4
    assert "not finished" in text_of(page, "state") and "did not come to its end" in text_of(
        page, "sentence"
    )
    page.ask("document.querySelectorAll('#stage .node')[1].focus()")
    page.press("Enter")
    assert "generator" in page.wait(
        "!document.getElementById('node').hidden && document.getElementById('node').textContent"
    )
    enter(page, "find", "staleness_max")
    page.wait(
        "[...document.querySelectorAll('.chart .name')].some(e => e.textContent == 'staleness_max')"
    )
    enter(page, "find", "no such series")
    page.wait(
        "document.getElementById('count').textContent.includes('no series is called like that')"
    )
    click(page, ".chart h3 button", "×")
    page.wait(
        "![...document.querySelectorAll('.chart .name')].some(e => e.textContent == 'reward_mean')"
    )


def test_an_edge_s_numbers_stand_in_a_panel(
    folder: RunFolder, serve: Callable[..., Any], window: Browser
) -> None:
    def ask(where: RunFolder, patience_s: float) -> Any:
        return told(100, 5.0)

    page = filled(window, serve([folder], ask).port)
    page.wait("document.getElementById('edges').textContent.includes('4 of 8')")
    click(page, "#edges button", "prompts → generator")
    page.wait(
        "document.getElementById('node').textContent.includes('4 rows of 8 that there is credit"
        " for')"
    )
    assert "100 rows, 9.77 KiB, in 100 batches, counted where it ends" in text_of(page, "node")
    assert page.ask("document.querySelectorAll('#stage .link.picked').length") == 1
    assert page.ask("document.querySelectorAll('#stage .link.half').length") == 1, (
        "half of its credit is in use"
    )
    click(page, "#weights button", "trainer → generator")
    page.wait("document.getElementById('node').textContent.includes('0.75 s, from its start')")
    found = text_of(page, "node")
    assert "0.25 s, from its arrival" in found and "1.00 MiB of 4.00 MiB in full, 75% less" in found
    assert (
        "0.75 versions on the mean, 2 at most" in found
        and "0.25 versions on the mean, 1 at most" in found
    )
    click(page, "#weights button", "trainer → generator")
    page.wait("document.getElementById('node').hidden")
    page.ask("document.querySelectorAll('#stage .node')[1].focus()")
    page.press("Enter")
    page.wait(
        "!document.getElementById('node').hidden && document.querySelectorAll('#stage"
        " .picked').length == 1"
    )
    assert not page.troubles


def test_two_runs_lie_over_each_other_and_are_told_apart(page: Browser) -> None:
    enter(page, "beside", "1")
    page.wait("document.querySelectorAll('.chart path.b').length > 2")
    assert "fakes" in text_of(page, "key-b") and "fakes" in text_of(page, "key-a")
    page.ask("document.querySelector('.chart svg').focus()")
    page.press("Home")
    page.wait("document.getElementById('readout').textContent.split('0.1').length == 3")
    enter(page, "run", "1")
    page.wait("location.hash == '#run=1'")


def test_what_happened_stands_on_one_axis(
    folder: RunFolder, serve: Callable[..., Any], window: Browser
) -> None:
    folder.append_metrics({"step": 3, "node": "eval", "eval_accuracy": 0.4})
    for step in (5, 6):
        folder.append_metrics(
            {
                "step": step,
                "node": "trainer",
                "loss": 0.3,
                "reward_mean": 0.2,
                "staleness_mean": 1.0,
            }
        )
    line = (
        '{"at": 4e9, "worker": "g-0", "cause": "was <b>killed</b>", "attempt": 0, "noticed_s": 0.1}'
    )
    (folder.path / "faults.jsonl").write_text(line + "\n")
    page = filled(window, serve([folder]).port)
    page.wait("document.querySelectorAll('.chart .m-fault').length > 2")
    places = (
        "[...document.querySelectorAll('.chart .m-{}')].map(e => e.getAttribute('d').split('"
        " ')[0].slice(1))"
    )
    count = page.ask("document.querySelectorAll('.chart').length")
    for kind in ("fault", "restart", "round"):
        found = page.ask(places.format(kind))
        assert len(found) == count and len(set(found)) == 1, (
            f"{kind} stands in each chart at the same place"
        )
    assert (
        page.ask("document.querySelector('.m-fault title').textContent").count("<b>killed</b>") == 1
    )
    assert "was <b>killed</b>" in text_of(page, "fault-rows") and page.ask(
        "document.getElementById('no-fault').hidden"
    )
    page.ask("document.querySelector('.chart svg').focus()")
    page.press("End")
    page.wait("document.getElementById('readout').textContent.includes('was <b>killed</b>')")
    page.press("ArrowLeft")
    page.wait(
        "document.getElementById('readout').textContent.includes('steps from 5 on were made again')"
    )
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    page.wait("document.getElementById('readout').textContent.includes('evaluation')")
    assert not page.troubles


def test_a_search_and_an_order_change_the_table(page: Browser) -> None:
    page.ask(
        "document.getElementById('search').value = 'answer 3';"
        " document.getElementById('question').requestSubmit()"
    )
    page.wait("document.querySelectorAll('#rows tbody tr').length == 6")
    for column, first in (
        ("reward", "answer 3 5"),
        ("length", "answer 3"),
        ("prompt", "answer 3"),
        ("error", "tool"),
    ):
        click(page, "#rows th button", column)
        page.wait(
            f"document.querySelector('#rows th[aria-sort=descending]')?.textContent == '{column} ↓'"
        )
        assert first in page.ask("document.querySelectorAll('#rows tbody tr')[0].textContent")
    click(page, "#rows th button", "staleness")
    page.wait(
        "document.querySelector('#rows th[aria-sort=descending]')?.textContent == 'staleness ↓'"
    )
    click(page, "#rows th button", "staleness")
    page.wait(
        "document.querySelector('#rows th[aria-sort=ascending]')?.textContent == 'staleness ↑'"
    )
    enter(page, "kind", "eval")
    page.wait(
        "document.getElementById('looked').textContent.includes('No evaluation has written rollouts"
        " yet')"
    )


def test_a_link_leads_to_one_rollout_with_its_tokens_its_scores_and_its_group(
    folder: RunFolder, serve: Callable[..., Any], window: Browser
) -> None:
    page = filled(window, serve([folder]).port, f"#run=0&rollout=step//{STEPS - 1}/4")
    page.wait("document.querySelectorAll('.tokens span').length == 4")
    assert "reward4" in page.ask("document.querySelector('#rollout-body .card').textContent")
    shown = "[...document.querySelectorAll('.tokens span')].map(e => e.className)"
    assert page.ask(shown) == [
        "given",
        "t0",
        "t3",
        "t0",
    ], "by importance ratio, which this run stores"
    enter_colour(page, "logprobs")
    page.wait(f"String({shown}) == 'given,t1,t3,t0'")
    assert page.ask("document.querySelector('#rollout .scale').textContent").startswith("≥ 90%")
    for colour, said in (("versions", "version 4"), ("importance ratio", "importance ratio 2.718")):
        enter_colour(page, colour)
        page.wait("document.querySelectorAll('.tokens span').length == 4")
        page.ask("document.querySelector('.tokens').focus()")
        for key in ("Home", "ArrowRight", "ArrowRight"):
            page.press(key)
        assert f"token 2 of 4: id 3, {said}" in page.ask(
            "[...document.querySelectorAll('#rollout p')].find(e =>"
            " e.textContent.startsWith('token')).textContent"
        )
    assert page.ask("document.querySelectorAll('.member').length") == 3
    assert "the same for all" not in page.ask("document.querySelector('#rollout-body').textContent")
    page.ask("document.querySelectorAll('.member a')[0].click()")
    page.wait("document.querySelector('#rollout-title').textContent.startsWith('Rollout 27')")
    page.wait(f"location.hash.endsWith('/{STEPS - 1}/3')")
    assert not page.troubles


def test_an_episodes_turns_stand_apart(
    folder: RunFolder, serve: Callable[..., Any], window: Browser
) -> None:
    folder.rollouts_of().step_file(2).unlink()
    folder.rollouts_of().write(2, rollouts(2, mask=(False, True, False, True)))
    page = filled(window, serve([folder]).port, "#run=0&rollout=step//2/0")
    page.wait("document.querySelectorAll('.turn').length == 4")
    assert page.ask("[...document.querySelectorAll('.turn b')].map(e => e.textContent)") == [
        "prompt",
        "policy, turn 1",
        "world",
        "policy, turn 2",
    ]
    assert "turns2 of the policy" in page.ask(
        "document.querySelector('#rollout-body .card').textContent"
    )


def test_where_several_trainers_keep_their_own_rollouts_those_of_one_are_shown(
    folder: RunFolder, serve: Callable[..., Any], window: Browser
) -> None:
    for node in ("actor", "critic"):
        (folder.rollouts / node).mkdir()
        for path in folder.rollouts.glob("*.arrow"):
            (folder.rollouts / node / path.name).write_bytes(path.read_bytes())
    for path in folder.rollouts.glob("*.arrow"):
        path.unlink()
    with Ledger.open(folder.ledger) as ledger:
        for step in range(1, STEPS + 1):
            for node in ("actor", "critic"):
                ledger.commit_step(node, step, version=step, source="prompts", trained=[])
    page = filled(window, serve([folder]).port)
    assert page.ask("[...document.getElementById('owner').options].map(e => e.value)") == [
        "actor",
        "critic",
    ]
    page.ask("document.querySelector('#rows tbody a').click()")
    page.wait(
        "location.hash.includes('rollout=step/actor/') && document.querySelectorAll('.tokens"
        " span').length"
    )


def test_a_node_is_found_by_a_part_of_its_name(page: Browser) -> None:
    enter(page, "find-node", "train")
    page.wait(
        "document.querySelector('.node.picked')?.getAttribute('aria-label').startsWith('trainer')"
    )
    assert "FakeTrainer" in text_of(page, "node")
    assert page.ask("document.activeElement.getAttribute('aria-label')").startswith("trainer")
    width = "document.querySelector('#stage svg').getBoundingClientRect().width"
    before = page.ask(width)
    page.ask("document.getElementById('in').click()")
    assert page.ask(width) > before
    page.ask("document.getElementById('fit').click()")
    assert page.ask(width) <= page.ask("document.getElementById('stage').clientWidth")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_nothing_is_wider_than_the_screen(page: Browser, width: int, dark: bool) -> None:
    page.look_like(width, 844, dark=dark)
    page.wait(f"document.documentElement.scrollWidth <= {width}")
    colour = page.ask("getComputedStyle(document.body).backgroundColor")
    assert colour == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")


def test_a_page_that_may_steer_asks_once_and_tells_what_came_of_it(
    folder: RunFolder, serve: Callable[..., Any], window: Browser
) -> None:
    calls: list[Any] = []

    def scale(run: RunFolder, wishes: Any, by: str) -> str:
        calls.append(dict(wishes))
        return "generator: 3 live"

    def stop(run: RunFolder, by: str) -> str:
        raise RunError("it <b>ends</b> already")

    controls = Controls(
        stop=stop,
        scale=scale,
        swap=lambda *_: "swapped",
        set_knob=lambda *_: "set",
        checkpoint=lambda *_: "kept",
    )
    page = filled(window, serve([folder], ask=lambda *_: told(10, 1.0), controls=controls).port)
    page.wait("!document.getElementById('stop-run').disabled")
    page.ask("document.querySelectorAll('#stage .node')[1].focus()")
    page.press("Enter")
    page.wait("!document.getElementById('steer-node').hidden")
    page.ask("document.querySelector('#steer-node input').value = 3")
    page.ask("document.querySelector('#steer-node form').requestSubmit()")
    assert "3 replicas" in page.wait(
        "document.getElementById('confirm').open &&"
        " document.getElementById('confirm-title').textContent"
    )
    assert not calls, "it asks first"
    page.ask(
        "document.getElementById('confirm-do').click();"
        " document.getElementById('confirm-do').click()"
    )
    page.wait("document.getElementById('confirm-answer').textContent == 'generator: 3 live'")
    page.ask("document.getElementById('confirm-cancel').click()")
    assert calls == [{"generator": 3}]
    page.ask("document.getElementById('stop-run').click()")
    page.ask("document.getElementById('confirm-cancel').click()")
    page.ask("document.getElementById('stop-run').click()")
    page.ask("document.getElementById('confirm-do').click()")
    page.wait("document.getElementById('confirm-answer').textContent == 'it <b>ends</b> already'")
    assert not page.troubles or all("409" in each for each in page.troubles)
