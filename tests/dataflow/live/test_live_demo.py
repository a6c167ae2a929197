"""The demo with its page open in a browser: what goes on is seen, and the page changes it and stops
it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rigs.browsing.chromium import Browser, browser, program

from dataflow.folder.run_folder import RunFolder
from dataflow.history.verify import verify
from dataflow.records import GROUP_ID

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        program() is None, reason="no Chromium here: apt-get install chromium-headless-shell"
    ),
]
SHARES = """[...document.querySelectorAll('#nodes .meter')].map(e =>
  [...e.children].reduce((sum, part) => sum + parseFloat(part.style.width || '0'), 0))"""


def seen(page: Browser, name: str) -> str:
    return str(page.ask(f"document.getElementById('{name}').textContent"))


def driven(page: Browser) -> None:
    """All that moves, once the run does."""
    page.wait("document.getElementById('state').textContent == 'under way'", 120)
    page.wait("document.querySelectorAll('.chart path.a').length >= 8", 120)
    assert "generator" in seen(page, "sentence") or "trainer" in seen(page, "sentence")
    first = seen(page, "progress")
    page.wait(f"document.getElementById('progress').textContent != {json.dumps(first)}", 60)
    page.wait(
        "[...document.querySelectorAll('#stage .now')].some(e =>"
        " e.textContent.includes('tokens/s'))",
        60,
    )
    page.wait(
        "[...document.querySelectorAll('#edges td')].some(e => /\\d+ of \\d+/.test(e.textContent))",
        60,
    )
    assert all(share <= 100.5 for share in page.ask(SHARES)) and any(
        share > 50 for share in page.ask(SHARES)
    )
    assert "MiB" in seen(page, "nodes") and "trainer → generator" in seen(page, "weights")
    page.ask("document.querySelector('#question button').click()")
    page.wait("document.querySelectorAll('#rows tbody tr').length == 50", 60)
    page.ask("document.querySelector('#rows tbody a').click()")
    page.wait("document.querySelectorAll('.tokens span[class^=t]').length > 2", 60)
    assert page.ask("document.querySelectorAll('.member').length") == 8
    page.press("Escape")


def confirmed(page: Browser) -> str:
    """What came of what was asked for."""
    page.wait("document.getElementById('confirm').open")
    page.ask("document.getElementById('confirm-do').click()")
    page.wait("document.getElementById('confirm-answer').className == 'done'", 60)
    answer = seen(page, "confirm-answer")
    page.ask("document.getElementById('confirm-cancel').click()")
    return answer


def changed(page: Browser) -> None:
    """A knob set, a checkpoint asked for, a generator more, another scorer: each from the page."""
    page.ask("document.getElementById('keep-checkpoint').click()")
    confirmed(page)
    page.ask(PICK % "trainer")
    page.wait("document.querySelector('#steer-node select')")
    page.ask(
        "(e => { e.value = 'lr'; e.onchange(); })(document.querySelector('#steer-node select'))"
    )
    page.ask(
        "document.querySelector('#steer-node select').closest('form').querySelector('input').value"
        " = '0.0002'"
    )
    page.ask("document.querySelector('#steer-node select').closest('form').requestSubmit()")
    assert "lr" in confirmed(page)
    page.ask(PICK % "generator")
    page.wait("document.querySelector('#steer-node h3').textContent.includes('generator')")
    page.ask("document.querySelector('#steer-node input[type=number]').value = 2")
    page.ask("document.querySelector('#steer-node input[type=number]').form.requestSubmit()")
    assert "generator" in confirmed(page)
    page.wait(
        "[...document.querySelectorAll('#nodes tr')].some(e => e.cells[0].textContent =="
        " 'generator' && [...e.cells].some(cell => cell.textContent == '2'))",
        60,
    )


def swapped(page: Browser) -> None:
    """Another reward from the page; its mark is seen there, and rollouts that it has judged."""
    page.ask(PICK % "reward")
    page.wait("document.querySelector('#steer-node h3').textContent.includes('reward')")
    page.ask(
        "document.querySelector('#steer-node input[placeholder]').value = 'no_such_module:reward'"
    )
    page.ask("document.querySelector('#steer-node input[placeholder]').form.requestSubmit()")
    page.wait("document.getElementById('confirm').open")
    page.ask("document.getElementById('confirm-do').click()")
    page.wait("document.getElementById('confirm-answer').className == 'bad'", 90)
    assert "no_such_module" in seen(page, "confirm-answer")
    page.ask("document.getElementById('confirm-cancel').click()")
    page.ask(
        "document.querySelector('#steer-node input[placeholder]').value = 'shifted_rewards:shifted'"
    )
    page.ask("document.querySelector('#steer-node input[placeholder]').form.requestSubmit()")
    assert "'reward' is 'shifted_rewards:shifted' from now on" in confirmed(page)
    marked = (
        "[...document.querySelectorAll('.chart .m-swap title')].some(e =>"
        " e.textContent.includes('%s'))"
    )
    page.wait(marked % "shifted_rewards", 60)
    page.wait(marked % "lr", 60)
    chart = (
        "[...document.querySelectorAll('.chart')].find(e => e.querySelector('.name').textContent =="
        " 'reward_mean')"
    )
    page.wait(f"+{chart}.querySelector('.value').textContent >= {SHIFT}", 120)


def traced(page: Browser) -> set[str]:
    """What stands in the trace of the last minute, by the names of its spans and marks."""
    page.wait("!document.getElementById('minute').hidden", 60)
    text = page.ask("fetch(document.getElementById('minute').href).then(answer => answer.text())")
    events = [event for event in json.loads(text)["traceEvents"] if event["ph"] in "Xi"]
    assert max(event["ts"] + event.get("dur", 0) for event in events) <= 61e6
    return {str(event["name"]) for event in events}


SHIFT = 10.0
REWARDS = f"""from dataflow import scorer

@scorer
def shifted(completion: str, answer: str) -> float:
    return {SHIFT} + (completion.strip() == answer)
"""
DONE = {
    "generator",
    "reward",
    "trainer",
    "take weights",
    "forward and backward",
    "optimizer",
    "offer weights",
}
PICK = """(name => { const node = [...document.querySelectorAll('#stage .node')].find(e =>
  e.getAttribute('aria-label').split(':')[0] == name);
  if (!node.classList.contains('picked')) node.dispatchEvent(new MouseEvent('click')); })('%s')"""


@pytest.mark.timeout(600)
def test_the_demo_is_watched_and_stopped_from_its_page(tmp_path: Path) -> None:
    program_ = [
        sys.executable,
        "-m",
        "graphs.sorting",
        "--steps",
        "100000",
        "--eval-every",
        "10",
        "--runs",
        str(tmp_path / "runs"),
        "--policy",
        str(tmp_path / "policy"),
    ]
    (tmp_path / "shifted_rewards.py").write_text(REWARDS)
    where = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])),
    }
    with subprocess.Popen(
        program_, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=where
    ) as running:
        try:
            latest = tmp_path / "runs" / "latest"
            deadline = time.monotonic() + 240
            while not (latest / "graph.svg").exists():
                assert running.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            live = [sys.executable, "-m", "dataflow", "live", str(latest), "--steer"]
            with subprocess.Popen(live, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                try:
                    server.stdout.readline()
                    url = server.stdout.readline().strip()
                    with browser(tmp_path / "browser") as page:
                        page.look_like(1280, 900)
                        page.open(url)
                        driven(page)
                        assert traced(page) >= DONE
                        changed(page)
                        swapped(page)
                        assert any(
                            name.startswith("reward = shifted_rewards") for name in traced(page)
                        )
                        page.ask("document.getElementById('stop-run').click()")
                        confirmed(page)
                        page.wait("document.getElementById('state').textContent == 'stopped'", 120)
                        page.wait("!document.getElementById('requests').hidden", 60)
                        assert "from the live page" in seen(page, "request-rows")
                        assert traced(page) >= DONE
                        (refused,) = page.troubles
                        assert "409 (Conflict)" in refused and "api/steer" in refused
                finally:
                    server.send_signal(signal.SIGINT)
            assert running.wait(120) == 0
        finally:
            running.kill()
    folder = RunFolder.open(latest)
    asked: list[Any] = [
        json.loads(line) for line in (folder.path / "requests.jsonl").read_text().splitlines()
    ]
    assert "stop" in asked[-1]["request"] and not asked[-1]["refused"]
    verdict = verify(folder.path)
    assert verdict.clean and any("shifted_rewards:shifted" in note for note in verdict.notes), (
        verdict
    )
    by_group: dict[int, set[bool]] = {}
    for step, _ in folder.rollouts_of().files("step"):
        rows = folder.rollouts_of().read(step)
        for group, reward in zip(
            rows[GROUP_ID].to_pylist(), rows["reward"].to_pylist(), strict=True
        ):
            by_group.setdefault(group, set()).add(reward >= SHIFT)
    assert {len(judges) for judges in by_group.values()} == {1}, "no group is judged by both"
    assert {True, False} == set.union(*by_group.values())
