"""The page for everybody: by keyboard alone, by name, with contrast, and at rest for whom that is
better.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rigs.browsing.chromium import Browser, browser, program

from dataflow.folder.run_folder import RunFolder

pytestmark = pytest.mark.skipif(
    program() is None, reason="no Chromium here: apt-get install chromium-headless-shell"
)


ROLLOUT = "#run=0&rollout=step//5/1"


FOCUSED = (
    "(e => e.id || e.getAttribute('aria-label') || e.getAttribute('href') ||"
    " e.textContent)(document.activeElement)"
)


CONTRASTS = """(() => {
  const parse = text => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return {rgb: [r, g, b], a};
  };
  const part = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = rgb => 0.2126 * part(rgb[0]) + 0.7152 * part(rgb[1]) + 0.0722 * part(rgb[2]);
  const over = (top, below) => top.rgb.map((c, at) => c * top.a + below[at] * (1 - top.a));
  const paper = element => {
    const node = element.closest('.node'), layers = [];
    if (node && element !== node.querySelector('.now'))
      layers.push(parse(getComputedStyle(node.querySelector('.box')).fill));
    for (let at = element; at; at = at.parentElement)
      layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, style = getComputedStyle(element);
    const text = walker.currentNode.data.trim();
    if (!text || !element.getClientRects().length || style.visibility === 'hidden') continue;
    if (element.closest('[disabled], option, datalist, title, desc, .skip')) continue;
    const color = element instanceof SVGElement ? style.fill : style.color;
    const below = paper(element), ink = over(parse(color), below);
    const [a, b] = [light(ink), light(below)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05), kind = element.className.baseVal ?? element.className;
    if (ratio < 4.5)
      found.push(`${text.slice(0, 30)} (${element.tagName}.${kind}): ${ratio.toFixed(2)}`);
  }
  return [...new Set(found)];
})()"""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def page(folder: RunFolder, serve: Callable[..., Any], window: Browser) -> Browser:
    served = serve([folder])
    window.look_like(1280, 900)
    window.open(f"http://127.0.0.1:{served.port}/t0ken-of-a-test/")
    window.wait("document.querySelectorAll('.chart path.a').length > 2")
    window.wait(
        "document.querySelectorAll('#rows tbody tr').length && document.querySelectorAll('#nodes"
        " td').length"
    )
    return window


def stops(page: Browser, count: int) -> list[str]:
    """What the tab key leads to, one after the other."""
    found = []
    for _ in range(count):
        page.press("Tab")
        found.append(str(page.ask(FOCUSED)))
    return found


def test_everything_is_reached_by_the_tab_key_in_the_order_of_the_page(page: Browser) -> None:
    found = stops(page, 60)
    wanted = [
        "#graph",
        "#graph",
        "#series",
        "#rollouts",
        "#faults",
        "find-node",
        "out",
        "fit",
        "in",
        "stage",
    ]
    assert found[: len(wanted)] == wanted
    rest = ["Nodes", "Data edges", "Weight edges", "find", "kind", "search", "upto"]
    places = [found.index(name) for name in rest]
    assert places == sorted(places), found
    nodes = [
        name for name in found if name.partition(":")[0] in ("prompts", "generator", "trainer")
    ]
    assert len(nodes) == 1, "of the nodes one; the others by the arrow keys"
    page.press("Tab", shift=True)
    assert page.ask(FOCUSED) == found[-2]


def test_a_run_is_read_by_keyboard_alone(page: Browser) -> None:
    while not str(page.ask(FOCUSED)).startswith("prompts"):
        page.press("Tab")
    page.press("ArrowRight")
    assert page.ask(FOCUSED).startswith("generator")
    page.press("Enter")
    page.wait(
        "!document.getElementById('node').hidden &&"
        " document.activeElement.getAttribute('aria-pressed') == 'true'"
    )
    while page.ask("document.activeElement.id") != "find":
        page.press("Tab")
    page.write("staleness_max")
    page.press("Enter")
    page.wait(
        "[...document.querySelectorAll('.chart .name')].some(e => e.textContent == 'staleness_max')"
    )
    while page.ask("document.activeElement.tagName") != "svg":
        page.press("Tab")
    page.press("Home")
    page.wait("document.getElementById('readout').textContent.includes('at step 1:')")
    while page.ask("document.activeElement.id") != "search":
        page.press("Tab")
    page.write("answer 4")
    page.press("Enter")
    page.wait("document.querySelectorAll('#rows tbody tr').length == 6")
    while page.ask("document.activeElement.textContent") != "reward":
        page.press("Tab")
    page.press("Enter")
    page.wait("document.querySelector('#rows th[aria-sort=descending]')?.textContent == 'reward ↓'")
    while not str(page.ask("document.activeElement.getAttribute('aria-label')")).startswith(
        "open rollout"
    ):
        page.press("Tab")
    page.press("Enter")
    page.wait("document.querySelectorAll('.tokens span').length == 4")
    assert page.ask("document.activeElement.id") == "close", "the first thing in it"
    while (
        page.ask("document.activeElement.getAttribute('aria-label')")
        != "Tokens; the arrow keys read them"
    ):
        page.press("Tab")
    for key in ("Home", "ArrowRight"):
        page.press(key)
    page.wait("document.querySelector('#rollout-body').textContent.includes('token 1 of 4')")
    page.press("Escape")
    page.wait("!document.querySelector('#rollout').open")
    assert page.ask("document.activeElement.getAttribute('aria-label')").startswith(
        "open rollout"
    ), "back where it was"


def test_everything_that_acts_has_a_name(page: Browser) -> None:
    acting = {
        "button",
        "link",
        "textbox",
        "searchbox",
        "combobox",
        "image",
        "region",
        "dialog",
        "navigation",
        "alert",
    }
    for place in ("", ROLLOUT):
        page.ask(f"location.hash = '{place}'")
        if place:
            page.wait("document.querySelectorAll('.tokens span').length == 4")
        nodes = page.do("Accessibility.getFullAXTree")["nodes"]
        roles = [
            each
            for each in nodes
            if not each.get("ignored") and each.get("role", {}).get("value") in acting
        ]
        nameless = [
            each["role"]["value"]
            for each in roles
            if not str(each.get("name", {}).get("value", "")).strip()
        ]
        assert len(roles) > (5 if place else 30) and not nameless, nameless
    assert (
        page.ask("document.documentElement.lang") == "en"
        and page.ask("document.querySelectorAll('h1').length") == 1
    )


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("place", ["", ROLLOUT])
def test_text_stands_out_from_what_is_behind_it(page: Browser, dark: bool, place: str) -> None:
    page.look_like(1280, 900, dark=dark)
    page.ask(f"location.hash = '{place}'")
    if place:
        page.wait("document.querySelectorAll('.tokens span').length == 4")
    else:
        page.ask(
            "document.querySelectorAll('#stage .node')[1].dispatchEvent(new MouseEvent('click'))"
        )
    assert page.ask(CONTRASTS) == [], "4.5 to 1 is the least (WCAG 2, AA)"


def test_who_wants_nothing_to_move_sees_nothing_move(page: Browser, tmp_path: Path) -> None:
    moving = """[...document.querySelectorAll('*')].filter(e => {
      const style = getComputedStyle(e);
      return style.scrollBehavior === 'smooth' || style.animationName !== 'none' ||
        parseFloat(style.transitionDuration) > 0;
    }).length"""
    assert page.ask(moving) > 0
    page.look_like(1280, 900, still=True)
    assert page.ask(moving) == 0
