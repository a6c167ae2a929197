"""The display: what users read at fixed widths, and that nothing it is given can stop a run."""

import io
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rigs.examples import examples

from dataflow.display import (
    EdgeSnapshot,
    LiveView,
    NodeSnapshot,
    PlainView,
    SafeView,
    Snapshot,
    Summary,
    make_view,
)
from dataflow.display.formatting import (
    ASCII,
    UNICODE,
    age,
    clean,
    count,
    duration,
    fit,
    rate,
    score,
    sparkline,
    split_bar,
)
from dataflow.display.screen import Screen, lines, text_of
from dataflow.display.views import plain_line, summary_lines

SNAPSHOT = Snapshot(
    graph="sorting",
    step=40,
    steps=300,
    version=39,
    staleness_mean=1.9,
    staleness_max=4,
    staleness_bound=4,
    reward=0.42,
    accuracy=0.38,
    accuracy_before=0.19,
    tokens_per_s=23_123,
    rollouts_per_s=1240,
    elapsed_s=41,
    left_s=130,
    groups={"issued": 1500, "trained": 1280, "dropped": 0},
    warnings=("'reward' timed out on 2 rollouts",),
    nodes=(
        NodeSnapshot(
            name="prompts", state="running", rate=150, queue=0, busy=0.05, waiting=0.05, blocked=0.9
        ),
        NodeSnapshot(
            name="generator", state="running", rate=1240, queue=64, busy=0.97, blocked=0, note="v39"
        ),
        NodeSnapshot(name="reward"),
    ),
    edges=(
        EdgeSnapshot(
            producer="prompts", consumer="generator", source="prompts", depth=62, capacity=64
        ),
        EdgeSnapshot(
            producer="generator", consumer="reward", source="prompts", depth=128, capacity=512
        ),
        EdgeSnapshot(
            producer="generator", consumer="reward", source="held_out", depth=0, capacity=512
        ),
    ),
)


SUMMARY = Summary(
    faults=tuple(f"generator-{number} died (SIGKILL): not back" for number in range(7)),
    foreseen=("0.4 s a step, came 0.42 (+5%)", "0.95 efficiency, came 0.93"),
    changes=(
        ("swapped", "reward = rewards:strict after step 9"),
        ("swapped", "reward = rewards:mild after step 20"),
    ),
    graph="sorting",
    steps=300,
    wall_s=171,
    reward_before=0.2,
    reward_after=0.7,
    reward_steps=20,
    models=("runs/sorting/checkpoints/step-000300",),
    rollouts=76_800,
    dropped=3,
    accuracy_before=0.19,
    accuracy_after=0.74,
    efficiency=0.957,
    bounded_by="generator",
    staleness_mean=1.9,
    staleness_max=4,
    verdict="holds: issued 9,603 = trained 9,600 + dropped 3 + in flight 0",
    is_clean=True,
    folder="runs/sorting",
    commands=(("dataflow verify runs/sorting", "the ledger, from the folder alone"),),
)


def shown(snapshot: Snapshot, screen: Screen, rewards: list[float] | None = None) -> list[str]:
    return [text_of(line).rstrip() for line in lines(snapshot, rewards or [], screen)]


def test_the_screen_at_eighty_cells() -> None:
    assert shown(SNAPSHOT, Screen(width=79, height=21), [0.2, 0.3, 0.42]) == [
        "sorting  ━━━━────────────────────────────  step 40/300  0:41 elapsed, 2:10 left",
        "reward 0.42 ▁▄█   accuracy 0.19 → 0.38   staleness 1.9, max 4 of 4   version 39",
        "1,240 rollouts/s   23 k tokens/s   groups 1,500 issued, 1,280 trained",
        "",
        "node       state       rows/s   queue  busy █ blocked ▒ starved ▁ waiting ·",
        "prompts    running        150       0  █▒▒▒▒▒▒▒▒▒▒▒▒▒▒   5%",
        "generator  running      1,240      64  ███████████████  97%  v39",
        "reward                      –       –  ···············",
        "",
        "prompts → generator    ■■■■■   62/64     generator → reward (p… ■···· 128/512",
        "generator → reward (h… ·····   0/512",
        "",
        "! 'reward' timed out on 2 rollouts",
    ]


def test_the_screen_at_forty_cells_without_unicode() -> None:
    assert shown(SNAPSHOT, Screen(width=40, height=30, glyphs=ASCII)) == [
        "sorting  step 40/300  0:41 elapsed",
        "reward 0.42   accuracy 0.19 -> 0.38",
        "staleness 1.9, max 4 of 4   version 39",
        "1,240 rollouts/s   23 k tokens/s",
        "groups 1,500 issued, 1,280 trained",
        "",
        "node        rows/s   queue  busy #",
        "prompts        150       0  xxxxxx.   5%",
        "generator    1,240      64  #######  97%",
        "reward           -       -  .......",
        "",
        "prompts -> generator      #####   62/64",
        "generator -> reward (pro~ #.... 128/512",
        "generator -> reward (hel~ .....   0/512",
        "",
        "! 'reward' timed out on 2 rollouts",
    ]


def test_the_number_of_replicas_stands_beside_the_name_and_changes_with_them() -> None:
    one, three = (
        Snapshot(nodes=(NodeSnapshot(name="generator", replicas=count),)) for count in (1, 3)
    )
    assert shown(one, Screen(width=80))[-1].startswith("generator  ")
    assert shown(three, Screen(width=80))[-1].startswith("generator ×3  ")
    assert shown(three, Screen(width=80, glyphs=ASCII))[-1].startswith("generator x3  ")
    assert plain_line(three) == "step 0  generator x3  0:00 elapsed"
    assert plain_line(one) == "step 0  0:00 elapsed"


def test_where_nodes_are_too_many_the_busiest_are_shown_in_their_order() -> None:
    crowd = tuple(NodeSnapshot(name=f"node_{at}", busy=at / 100) for at in range(100))
    found = shown(Snapshot(nodes=crowd), Screen(width=80, height=10))
    assert len(found) <= 10
    assert [line.split()[0] for line in found[3:-1]] == [
        "node_95",
        "node_96",
        "node_97",
        "node_98",
        "node_99",
    ]
    assert found[-1] == "… 95 more nodes, less busy"


def test_the_plain_line_leaves_out_what_is_not_known() -> None:
    assert (
        plain_line(SNAPSHOT)
        == "step 40/300  reward 0.42  eval 0.38  staleness 1.9/4  1,240 rollouts/s  23 k tokens/s "
        " 0:41 elapsed, 2:10 left"
    )
    assert plain_line(Snapshot(step=3, elapsed_s=3725)) == "step 3  1:02:05 elapsed"
    assert plain_line(Snapshot()) == "step 0  0:00 elapsed"


def test_what_goes_on_beside_the_steps_is_told() -> None:
    starting = Snapshot(steps=300, doing="starting generator, trainer")
    assert plain_line(starting) == "step 0/300  starting generator, trainer  0:00 elapsed"
    assert shown(starting, Screen(width=80))[1] == "starting generator, trainer"


def test_the_summary_of_one_step_says_one_step() -> None:
    summary = Summary(graph="g", outcome="finished", steps=1, wall_s=2.0)
    assert text_of(summary_lines(summary, UNICODE)[0]) == "g finished  1 step in 0:02"


def test_the_summary_tells_the_outcome_and_what_to_look_at_next() -> None:
    found = [text_of(line).rstrip() for line in summary_lines(SUMMARY, UNICODE)]
    assert found == [
        "sorting finished  300 steps in 2:51",
        "  accuracy    0.19 → 0.74  +0.55",
        "  reward      0.20 → 0.70  +0.50, means of 20 steps",
        "  rollouts    76,800  449 per second",
        "  dropped     3 groups",
        "  efficiency  0.96  bounded by generator",
        "  staleness   1.9 mean, 4 max",
        "  foreseen    0.4 s a step, came 0.42 (+5%)",
        "              0.95 efficiency, came 0.93",
        "  faults      generator-2 died (SIGKILL): not back",
        *(f"              generator-{number} died (SIGKILL): not back" for number in range(3, 7)),
        "              and 2 before these",
        "  swapped     reward = rewards:strict after step 9",
        "              reward = rewards:mild after step 20",
        "  ledger      holds: issued 9,603 = trained 9,600 + dropped 3 + in flight 0",
        "  model       runs/sorting/checkpoints/step-000300  trained, as Hugging Face has them",
        "  run folder  runs/sorting",
        "",
        "to look further",
        "  dataflow verify runs/sorting  the ledger, from the folder alone",
    ]
    narrow = [text_of(line).rstrip() for line in summary_lines(SUMMARY, UNICODE, width=50)]
    assert narrow[-1] == "  dataflow verify runs/sorting"


# --- the views


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_the_plain_view_writes_a_line_per_interval_and_each_warning_once() -> None:
    stream, clock = io.StringIO(), Clock()
    view = PlainView(stream, interval_s=5, clock=clock)
    for at in range(21):
        clock.now_s = at * 0.5
        view.update(SNAPSHOT)
    view.message("checkpoint\nwritten")
    found = stream.getvalue().splitlines()
    assert found[0] == "warning: 'reward' timed out on 2 rollouts"
    assert found[1:] == [plain_line(SNAPSHOT)] * 3 + ["checkpoint written"]


def test_a_pipe_gets_plain_lines_and_a_terminal_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    pipe, terminal = io.StringIO(), Terminal()
    for stream in (pipe, terminal):
        with make_view(stream) as view:
            view.update(SNAPSHOT)
            view.message("hello")
            view.summary(SUMMARY)
    assert "\x1b" not in pipe.getvalue()
    assert pipe.getvalue().startswith("warning:")
    assert "\x1b[?25l" in terminal.getvalue()
    assert terminal.getvalue().count("\x1b[?25h") >= 1, "the cursor comes back"


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("TERM", "dumb")])
def test_no_screen_is_drawn_where_nobody_sees_it(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    terminal = Terminal()
    with make_view(terminal) as view:
        view.update(SNAPSHOT)
    assert terminal.getvalue().splitlines()[-1] == plain_line(SNAPSHOT)


def test_no_color_gives_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    seen = {}
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        terminal = Terminal()
        with make_view(terminal) as view:
            view.update(SNAPSHOT)
        seen[no_color] = terminal.getvalue()
    assert "\x1b[32m" in seen[""] and "\x1b[32m" not in seen["1"]
    assert "generator" in seen["1"]


def test_the_live_view_draws_no_more_often_than_it_should() -> None:
    clock, stream = Clock(), Terminal()
    console = Console(file=stream, force_terminal=True, width=80, height=24)
    view = LiveView(console, clock=clock)
    drawn = []
    for at in range(8):
        clock.now_s = at * 0.25
        before = stream.tell()
        view.update(SNAPSHOT)
        drawn.append(stream.tell() > before)
    view.close()
    assert drawn == [True, False] * 4


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_that_knows_few_signs_gets_only_those(encoding: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    view = LiveView(Console(file=stream, force_terminal=True, width=80, height=24))
    view.update(SNAPSHOT)
    view.message("naïve 排序")
    view.summary(SUMMARY)
    plain = PlainView(stream)
    plain.message("naïve 排序")
    plain.summary(SUMMARY)
    stream.flush()
    text = raw.getvalue().decode(encoding)
    assert ("→" in text) == (encoding == "utf-8")
    assert ("ï" in text) == (encoding != "ascii")


class Broken(io.StringIO):
    """A stream whose other end is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError("gone")


def test_a_stream_that_is_gone_or_closed_is_borne_in_silence() -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (Broken(), closed, None):
        with make_view(stream) as view:  # type: ignore[arg-type]
            view.update(SNAPSHOT)
            view.message("hello")
            view.summary(SUMMARY)


class Failing(PlainView):
    """A view with a fault."""

    def update(self, snapshot: Snapshot) -> None:
        raise ZeroDivisionError("a fault in the display")


def test_where_a_view_fails_the_next_one_shows_the_same() -> None:
    stream = io.StringIO()
    with SafeView([lambda: Failing(io.StringIO()), lambda: PlainView(stream)]) as view:
        view.update(SNAPSHOT)
    assert stream.getvalue().splitlines()[-1] == plain_line(SNAPSHOT)


def test_a_message_from_a_signal_handler_waits_for_the_act_under_way() -> None:
    stream = io.StringIO()
    said: list[SafeView] = []

    class Interrupted(PlainView):
        def update(self, snapshot: Snapshot) -> None:
            said[0].message("stopping")
            super().update(snapshot)

    with SafeView([lambda: Interrupted(stream)]) as view:
        said.append(view)
        view.update(Snapshot(step=1))
    assert stream.getvalue().splitlines() == ["step 1  0:00 elapsed", "stopping"]


# --- anything at all

ODD_NUMBER = (
    st.none()
    | st.floats()
    | st.integers()
    | st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -0.0])
)


ODD_TEXT = st.text(max_size=40) | st.sampled_from(
    ["\x1b[2J", "a\nb", "排序", "\ud800", "[red]x[/red]"]
)


def odd(kind: type, **extra: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values of a snapshot's class with any number, NaN or nothing in every field."""
    words = {
        "name",
        "state",
        "note",
        "source",
        "target",
        "graph",
        "outcome",
        "bounded_by",
        "verdict",
        "folder",
        "look",
    }
    fields = {name: ODD_TEXT if name in words else ODD_NUMBER for name in kind.__dataclass_fields__}  # type: ignore[attr-defined]
    return st.builds(kind, **{**fields, **extra})


SNAPSHOTS = odd(
    Snapshot,
    groups=st.dictionaries(ODD_TEXT, ODD_NUMBER, max_size=4),
    warnings=st.lists(ODD_TEXT, max_size=3).map(tuple),
    nodes=st.lists(odd(NodeSnapshot), max_size=5).map(tuple),
    edges=st.lists(odd(EdgeSnapshot), max_size=5).map(tuple),
)


SUMMARIES = odd(
    Summary,
    faults=st.lists(ODD_TEXT, max_size=7).map(tuple),
    changes=st.lists(st.tuples(st.just("set"), ODD_TEXT), max_size=3).map(tuple),
    foreseen=st.lists(ODD_TEXT, max_size=3).map(tuple),
    models=st.lists(ODD_TEXT, max_size=2).map(tuple),
    commands=st.lists(st.tuples(ODD_TEXT, ODD_TEXT), max_size=2).map(tuple),
)


SCREENS = st.builds(
    Screen,
    width=st.integers(0, 200),
    height=st.integers(0, 60),
    glyphs=st.sampled_from([UNICODE, ASCII]),
)


NO_ROOM_FOR_NODES = (
    Snapshot(
        nodes=(NodeSnapshot(name="a"), NodeSnapshot(name="b")), accuracy=0.0, tokens_per_s=0.0
    ),
    [],
    Screen(width=8, height=8, glyphs=UNICODE),
)


@examples(200)
@given(SNAPSHOTS, st.lists(st.floats(), max_size=50), SCREENS)
@example(*NO_ROOM_FOR_NODES)
def test_any_snapshot_fits_any_screen(
    snapshot: Snapshot, rewards: list[float], screen: Screen
) -> None:
    found = lines(snapshot, rewards, screen)
    assert len(found) <= screen.height
    for line in found:
        assert cell_len(text_of(line)) <= screen.width
        assert not any(ord(char) < 32 for char in text_of(line))


@examples(60)
@given(SNAPSHOTS, SUMMARIES, ODD_TEXT, st.integers(1, 120), st.sampled_from(["utf-8", "ascii"]))
def test_no_view_raises_whatever_it_is_given(
    snapshot: Snapshot, summary: Summary, text: str, width: int, encoding: str
) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    console = Console(file=stream, force_terminal=True, width=width, height=20)
    for view in (LiveView(console), PlainView(stream)):
        view.update(snapshot)
        view.message(text)
        view.summary(summary)
        view.close()
    stream.flush()
    assert raw.getvalue()


# --- words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (38, "38"),
        (1240, "1,240"),
        (9999.4, "9,999"),
        (9999.6, "10 k"),
        (23_123, "23 k"),
        (999_999, "1,000 k"),
        (4.12e6, "4.1 M"),
        (math.nan, "–"),
        (None, "–"),
        (math.inf, "–"),
        (True, "–"),
    ],
)
def test_counts_are_short(value: float | None, text: str) -> None:
    assert count(value) == text


def test_other_numbers_are_short_too() -> None:
    assert [rate(0.43), rate(0), rate(38.2)] == ["0.4", "0", "38"]
    assert [score(0.4249), score(-1), score(250.2), score(12_345)] == [
        "0.42",
        "-1.00",
        "250",
        "12 k",
    ]
    assert [age(2.0), age(1.94), age(None)] == ["2", "1.9", "–"]
    assert [duration(41), duration(725), duration(3723), duration(-5)] == [
        "0:41",
        "12:05",
        "1:02:03",
        "0:00",
    ]


def test_a_sparkline_shows_the_way_of_the_values_in_few_signs() -> None:
    assert sparkline([0, 1, 2, 3], 4, "abcd") == "abcd"
    assert sparkline(list(range(100)), 4, "abcd") == "abcd"
    assert sparkline([5, 5], 4, "abcd") == "aa"
    assert sparkline([1, math.nan, 2], 4, "ab") == "ab"
    assert sparkline([], 4, "abcd") == ""


@given(ODD_NUMBER, ODD_NUMBER, st.integers(0, 40))
def test_a_bar_is_always_as_wide_as_it_should_be(
    busy: float | None, blocked: float | None, width: int
) -> None:
    assert len("".join(split_bar(busy, blocked, busy, width, UNICODE))) == width


@given(st.text(max_size=30), st.integers(0, 20))
def test_fitted_text_has_the_width_asked_for(text: str, width: int) -> None:
    assert cell_len(fit(clean(text), width)) == width
