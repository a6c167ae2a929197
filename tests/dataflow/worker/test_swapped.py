"""Operators that take the place of others: found by name, kept as text, refused where the graph
cannot take them.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from rigs.graphs import fake_graph

from dataflow import Array, Graph, keep, scorer
from dataflow.errors import GraphError
from dataflow.folder.live_changes import Swap
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import plan
from dataflow.worker import swapped as room
from dataflow.worker.swapped import find, load, swapped, tried

HEAD = "from dataflow import keep, scorer\n"


STRICT = (
    HEAD
    + """
@scorer(isolate=False)
def strict(completion: str, worth: float = {worth}) -> float:
    return worth
"""
)


@keep(isolate=False)
def varied(reward: Array) -> bool:
    return bool(reward.max() > reward.min())


@scorer(isolate=False)
def reward(completion: str) -> float:
    return 0.0


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Puts a module `swapped_rewards` where programs find it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> Path:
        path = tmp_path / "swapped_rewards.py"
        path.write_text(text)
        return path

    yield write
    sys.modules.pop("swapped_rewards", None)


def wanted(attribute: str = "strict", node: str = "reward") -> Swap:
    return Swap(number=1, node=node, reference=f"swapped_rewards:{attribute}")


def graph() -> Graph:
    return fake_graph(scorers=(reward, varied))


def attempt(swap: Swap) -> Swap:
    made = graph()
    return tried(made, plan(made, Devices(cpus=1)), swap)


def test_an_operator_is_found_and_takes_the_nodes_name(write: Callable[[str], Path]) -> None:
    path = write(STRICT.format(worth=1.0))
    found = attempt(wanted())
    assert (found.file, found.source) == (str(path), path.read_text()) and len(found.digest) == 64
    made = swapped(graph(), [found])
    assert made.operators["reward"].name == "reward" and made.operators["reward"]("x") == 1.0  # type: ignore[operator]
    assert list(made.operators) == list(graph().operators)


def test_a_trial_tells_which_knobs_may_be_set_and_of_what_kind_they_are(
    write: Callable[[str], Path],
) -> None:
    write(
        HEAD
        + "from typing import Literal\n\n@scorer(isolate=False)\ndef strict(completion: str, worth:"
        " float = 1, most: int | None = None, how: Literal['a', 'b'] = 'a', of: object = 'x',"
        " table: tuple = ()) -> float:\n    return worth\n"
    )
    knobs = attempt(wanted()).settable()
    assert {name: each.kind for name, each in knobs.items()} == {
        "worth": float,
        "most": int | None,
        "how": Literal["a", "b"],
    }
    assert knobs["most"].taken(3, "reward", "most") == 3
    with pytest.raises(GraphError, match="'reward' has how='a' and cannot take 'c'; give one of"):
        knobs["how"].taken("c", "reward", "how")


def test_a_reward_of_another_system_takes_a_place_as_it_is(write: Callable[[str], Path]) -> None:
    import operators.rewards  # noqa: F401  as the run's program does

    write("def theirs(completions, **kwargs):\n    return [2.0 for _ in completions]\n")
    found = attempt(Swap(number=1, node="reward", reference="trl:swapped_rewards:theirs"))
    made = swapped(graph(), [found]).operators["reward"]
    assert made.name == "reward" and made(prompt=["p"], completion=["x"]) == [2.0]  # type: ignore[operator]
    with pytest.raises(GraphError, match="no form of rewards is called 'tlr'.*did you mean 'trl'"):
        attempt(Swap(number=1, node="reward", reference="tlr:swapped_rewards:theirs"))


def test_an_operator_is_found_by_its_file_wherever_that_is(tmp_path: Path) -> None:
    import operators.rewards  # noqa: F401  as the run's program does

    file = tmp_path / "elsewhere" / "json.py"
    file.parent.mkdir()
    file.write_text(
        STRICT.format(worth=3.0) + "\n\ndef theirs(completions, **kwargs):\n    return [4.0]\n"
    )
    for reference, value in ((f"{file}:strict", 3.0), (f"trl:{file}:theirs", [4.0])):
        found = attempt(Swap(number=1, node="reward", reference=reference))
        made = swapped(graph(), [found]).operators["reward"]
        assert (found.file, found.source) == (str(file), file.read_text())
        given = {"completion": "x"} if value == 3.0 else {"prompt": ["p"], "completion": ["x"]}
        assert made(**given) == value  # type: ignore[operator]
    assert sys.modules["json"].__file__ != str(file), "a module of its name stays"
    with pytest.raises(
        GraphError, match=rf"'json\.py' \({file}\) has no 'strikt'; did you mean 'strict'"
    ):
        attempt(Swap(number=1, node="reward", reference=f"{file}:strikt"))


def test_a_module_is_read_anew_whatever_was_imported_of_it(write: Callable[[str], Path]) -> None:
    for worth in (1.0, 2.0, 3.0):
        path = write(STRICT.format(worth=worth))
        # as old as the one before, and as large: no compiled file would be found outdated
        os.utime(path, (1, 1))
        assert load(find(wanted()))("x") == worth


def test_what_was_kept_counts_and_not_what_the_file_has_become(
    write: Callable[[str], Path],
) -> None:
    path = write(STRICT.format(worth=1.0))
    kept = find(wanted())
    path.write_text("this is no Python")
    assert swapped(graph(), [kept]).operators["reward"]("x") == 1.0  # type: ignore[operator]
    path.unlink()
    assert load(kept)("x") == 1.0


def test_later_swaps_count_and_filters_are_swapped_for_filters(
    write: Callable[[str], Path],
) -> None:
    write(STRICT.format(worth=1.0))
    first = find(wanted())
    write(
        STRICT.format(worth=2.0)
        + "@keep(isolate=False)\ndef all(reward: list[float]) -> bool:\n    return True\n"
    )
    second = dataclasses.replace(find(wanted()), number=2)
    third = dataclasses.replace(find(wanted("all", "varied")), number=3)
    made = swapped(graph(), [first, second, third])
    assert made.operators["reward"]("x") == 2.0 and made.operators["varied"]([1.0])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "@scorer\ndef strict(completion: str) -> int: return 1",
            "would write {'error': 'string', 'reward': 'int64'}",
        ),
        (
            "@scorer\ndef strict(lexicon: str) -> float: return 1.0",
            "'reward' reads column 'lexicon', but 'generator'",
        ),
        (
            "@keep\ndef strict(completion: list[str]) -> bool: return True",
            "'swapped_rewards:strict' is a filter",
        ),
        (
            "def strict(completion: str) -> float: return 1.0",
            "is a function, .* decorate it with @scorer",
        ),
        ("strict = 3", "is a int, and no operator that a live run could take in; name one"),
        (
            "@scorer\ndef strictest(completion: str) -> float: return 1.0",
            "has no 'strict'; did you mean 'strictest'",
        ),
        (
            "import nowhere_at_all",
            "cannot be imported: ModuleNotFoundError: No module named 'nowhere_at_all'",
        ),
        ("def strict(:", r"cannot be imported: SyntaxError: .*swapped_rewards\.py"),
        ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
        (
            "strict = " + "'x' * 1" * 60_000,
            "has 420,0.. bytes, and a run keeps a module of 262,144 at most",
        ),
        (
            "@scorer\ndef strict(reward: float) -> float: return 1.0",
            "writes column 'reward', which it also reads",
        ),
    ],
)
def test_what_the_run_cannot_take_in_is_refused_with_the_reason(
    write: Callable[[str], Path], text: str, said: str
) -> None:
    write(HEAD + text + "\n")
    with pytest.raises(GraphError, match=said):
        attempt(wanted())


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("strict", "write it as reward=rewards:strict"),
        (
            "nowhere/rewards.py:strict",
            "/nowhere/rewards.py' cannot be read where the run is: No such file",
        ),
        (
            "rewards.py:str ict",
            "write it as reward=rewards:strict or reward=path/to/rewards.py:strict",
        ),
        ("a b:c", "write it as reward=rewards:strict"),
        ("__main__:strict", "names the program that is running"),
        ("nowhere_at_all:strict", "names module 'nowhere_at_all', which is not found where"),
        ("nowhere_at_all.below:strict", "cannot be imported: ModuleNotFoundError"),
        ("sys:path", "names module 'sys', which has no Python file"),
    ],
)
def test_a_reference_that_names_nothing_is_refused(reference: str, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        attempt(Swap(number=1, node="reward", reference=reference))


def test_a_worker_gets_the_size_of_text_that_was_checked() -> None:
    assert room.MOST_BYTES * 8 < 64 << 20, "several of them go into one message"
