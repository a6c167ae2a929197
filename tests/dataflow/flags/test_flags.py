"""Flags: those that a function's parameters declare, read from words and from files, told in
groups.
"""

import importlib
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import tyro

from dataflow import Graph, GraphError, main
from dataflow.app import all_flags
from dataflow.flags import config_file
from dataflow.flags.declared import ALGORITHM, FIRST, Declared, Flag
from dataflow.flags.run_flags import RUN_FLAGS
from dataflow.flags.words import FlagError, page, split

TEXT = ("aipo", "grpo", "rloo", "dapo", "ppo", "distill", "sft")


OWN = ("arithmetic", "sorting", "calculator", "guess", "products", "lake", "played_by_programs")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes."""

    heading: ClassVar[str] = "sizes"

    width: int = 8
    """How wide
    it is."""


@dataclass(frozen=True, kw_only=True)
class Task(Sizes):
    """A task."""

    policy: str
    """Hugging Face folder."""
    lr: float = 1e-6
    """Learning rate."""
    chat: bool = False
    spare: bool | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    targets: tuple[str, ...] | None = None
    mode: Literal["fast", "slow"] = "fast"
    epochs: int | None = None
    note: str = ""
    path: Path = Path("a")


def build(*, task: Task, kl: float = 0.0) -> Graph:
    """Train it.

    Args:
        kl: what a nat costs.
    """
    raise AssertionError


DECLARED = Declared.of(build)


FLAGS = {**DECLARED.flags, "track": next(flag for flag in RUN_FLAGS if flag.name == "track")}


def values(*words: str) -> dict[str, Any]:
    return {name: given.value() for name, given in split(words, FLAGS, "the.program").items()}


def refused(*words: str) -> str:
    with pytest.raises(FlagError) as error:
        values(*words)
    return str(error.value)


def test_each_field_of_a_dataclass_is_a_flag_with_its_doc_under_the_heading_of_its_class() -> None:
    told = {name: (flag.heading, flag.help) for name, flag in DECLARED.flags.items()}
    assert told["width"] == ("sizes", "How wide it is.") and told["lr"] == (FIRST, "Learning rate.")
    assert told["kl"] == (ALGORITHM, "what a nat costs.") and DECLARED.flags["policy"].is_needed
    made = DECLARED.arguments(
        {flag.name: flag.default for flag in DECLARED.flags.values()} | {"policy": "p"}
    )
    assert made == {"task": Task(policy="p"), "kl": 0.0}


def test_two_flags_of_one_name_are_refused() -> None:
    def both(*, task: Task, lr: float = 1.0) -> Graph:
        raise AssertionError

    with pytest.raises(GraphError, match="'both' has two parameters 'lr'"):
        Declared.of(both)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--lr", "1e-6"), {"lr": 1e-6}),
        (("--lr=3",), {"lr": 3.0}),
        (("--kl", "-1"), {"kl": -1.0}),
        (("--chat",), {"chat": True}),
        (("--no-chat",), {"chat": False}),
        (("--chat=no",), {"chat": False}),
        (("--chat", "false"), {"chat": False}),
        (("--spare",), {"spare": True}),
        (("--no-spare",), {"spare": False}),
        (("--spare=none",), {"spare": None}),
        (("--betas", "0.8", "0.9"), {"betas": (0.8, 0.9)}),
        (("--targets", "q", "k", "--kl", "1"), {"targets": ("q", "k"), "kl": 1.0}),
        (("--note", ""), {"note": ""}),
        (("--note=",), {"note": ""}),
        (("--note=--lr",), {"note": "--lr"}),
        (("--mode", "slow"), {"mode": "slow"}),
        (("--epochs", "None"), {"epochs": None}),
        (("--path", "b/c"), {"path": Path("b/c")}),
        (("--width", "3", "--width", "4"), {"width": 4}),
        (("--lr", "inf"), {"lr": math.inf}),
        (("--track", "a", "--track=b"), {"track": ("a", "b")}),
    ],
)
def test_words_become_values(words: tuple[str, ...], found: dict[str, Any]) -> None:
    assert values(*words) == found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--lr", "fast"), "--lr is 'fast', but takes a number"),
        (("--width", "8.5"), "--width is '8.5', but takes a whole number"),
        (("--width",), "--width has no value, but takes a whole number"),
        (("--betas", "0.9"), "--betas is '0.9', but takes a number and a number"),
        (("--mode", "slw"), "--mode is 'slw', but takes one of fast, slow; did you mean slow?"),
        (("--epochs", "all"), "--epochs is 'all', but takes a whole number or None"),
        (("--chat=perhaps",), "--chat is 'perhaps', but takes true or false"),
        (("--lr", "1", "2"), "the.program was given '2', which belongs to no flag"),
        (("words",), "the.program was given 'words', which belongs to no flag"),
        (("--widht", "3"), "the.program has no --widht; did you mean --width?"),
        (("-lr", "3"), "the.program has no -lr; did you mean --lr?"),
        (("--learning_rate", "3"), "the.program has no --learning_rate; it is called --lr here"),
        (
            ("actor_rollout_ref.actor.optim.lr=3",),
            "no actor_rollout_ref.actor.optim.lr; it is called --lr here",
        ),
        (
            ("--loss-type", "dapo"),
            "no --loss-type; that is Trainer(loss=...), in the file of a graph",
        ),
        (("--no-such-thing-at-all",), "the.program has no --no-such-thing-at-all; see its --help"),
    ],
)
def test_words_that_are_no_flags_or_no_values_are_refused_in_one_sentence(
    words: tuple[str, ...], said: str
) -> None:
    assert said in refused(*words) and "\n" not in refused(*words)


def test_all_flags_that_nobody_has_are_told_at_once() -> None:
    assert refused("--learning_rate", "1", "--lr", "2", "--foo=3").count("the.program has no") == 2


def read(tmp_path: Path, text: str, name: str = "run.yaml") -> dict[str, Any]:
    path = tmp_path / name
    path.write_text(text)
    found = config_file.read(path, FLAGS, "the.program", "the.program")
    return {name: given.value() for name, given in found.items()}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("lr: 1e-6", {"lr": 1e-6}),
        ("width: 010", {"width": 10}),
        ("note: no", {"note": "no"}),
        ("note: 1.10", {"note": "1.10"}),
        ("note: 12:30", {"note": "12:30"}),
        ("note: '#'", {"note": "#"}),
        ("note: 'null'", {"note": "null"}),
        ("note:", {"note": ""}),
        ("chat: yes", {"chat": True}),
        ("chat: off", {"chat": False}),
        ("epochs: null", {"epochs": None}),
        ("epochs: ~", {"epochs": None}),
        ("betas: [0.8, 0.9]", {"betas": (0.8, 0.9)}),
        ("targets:\n  - q\n  - k", {"targets": ("q", "k")}),
        ("targets: [q]", {"targets": ("q",)}),
        ("track: wandb", {"track": ("wandb",)}),
        ("track: [a, b]", {"track": ("a", "b")}),
        ("track: []", {"track": ()}),
        ("no_such: 1", None),
        ("graph: the.program\nlr: 1", {"lr": 1.0}),
        ("max-width: 1", None),
        ("", {}),
        ("# nothing", {}),
    ],
)
def test_a_line_of_yaml_means_what_its_words_would_on_a_command_line(
    line: str, found: dict[str, Any] | None, tmp_path: Path
) -> None:
    if found is None:
        with pytest.raises(FlagError):
            read(tmp_path, line)
    else:
        assert read(tmp_path, line) == found


def test_toml_is_read_too(tmp_path: Path) -> None:
    text = 'lr = 1e-6\nwidth = 10\nnote = "no"\nchat = true\nbetas = [0.8, 0.9]\npolicy = "p"\n'
    assert read(tmp_path, text, "run.toml") == {
        "lr": 1e-6,
        "width": 10,
        "note": "no",
        "chat": True,
        "betas": (0.8, 0.9),
        "policy": "p",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "lr: 1\nwidht: 3",
            "run.yaml, line 2: the.program has no flag 'widht'; did you mean --width?",
        ),
        (
            "num_generations: 3",
            "run.yaml, line 1: the.program has no flag 'num_generations'; that is Generator",
        ),
        ("lr: fast", "run.yaml, line 1: lr is 'fast', but takes a number"),
        ("width: 8.0", "width is '8.0', but takes a whole number"),
        ("width:", "width has no value, but takes a whole number"),
        ("chat: perhaps", "chat is 'perhaps', but takes true or false"),
        ("lr: [1, 2]", "lr is a list, ['1', '2'], but takes a number"),
        ("lr: {a: 1}", "lr has keys or lists of its own"),
        ("targets: [[q]]", "targets has keys or lists of its own"),
        ("lr: 1\nlr: 2", "line 2: lr stands there twice"),
        ("- lr", "is no list of keys and values"),
        ("lr: [1", "run.yaml, line 1 is no YAML"),
        ("? [a]\n: 1", "a key is the name of a flag"),
        ("note: !!python/object/apply:os.system [ls]", "note has the tag"),
        ("note: !mine x", "note has the tag !mine"),
        (
            "graph: graphs.grpo",
            "run.yaml has flags of graphs.grpo, and this is the.program; start it with dataflow",
        ),
        ("resume: runs/x", None),
        ("config: other.yaml", None),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_line_and_key(
    text: str, said: str | None, tmp_path: Path
) -> None:
    with pytest.raises(FlagError) as error:
        read(tmp_path, text)
    assert (said or "is no part of what a file of flags says") in str(error.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match="there is no file"):
        config_file.read(tmp_path / "x.yaml", FLAGS, "", "p")
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(FlagError, match="cannot be read as a file of flags"):
        config_file.read(tmp_path / "x.yaml", FLAGS, "", "p")
    (tmp_path / "x.toml").write_text("lr = ")
    with pytest.raises(FlagError, match="is no TOML"):
        config_file.read(tmp_path / "x.toml", FLAGS, "", "p")


def every(graph: str) -> dict[str, Flag]:
    return all_flags(Declared.of(importlib.import_module(f"graphs.{graph}").build), None)


def other(flag: Flag) -> list[str]:
    """Words for a flag, of another value than its default."""
    if flag.is_switch:
        return [f"--no-{flag.option[2:]}" if flag.default else flag.option]
    if flag.choices:
        return [
            flag.option,
            next(choice for choice in flag.choices if choice and choice != flag.default),
        ]
    if flag.takes_many:
        return [
            flag.option,
            *(
                ["0.5", "0.25"]
                if "float" in str(flag.kind)
                else ["no", "a b: #c"][: 1 + flag.repeats]
            ),
        ]
    kind = flag.kinds[0]
    return [flag.option, {int: "7", float: "3e-7", str: "it's: # no", Path: "a b/c"}[kind]]


@pytest.mark.parametrize("graph", [*TEXT, *OWN])
def test_what_a_run_leaves_gives_the_same_flags_again(graph: str, tmp_path: Path) -> None:
    known = every(graph)
    cases = [[], [word for flag in known.values() if not flag.repeats for word in other(flag)]]
    for words in cases:
        given = split(words, known, graph)
        asked = {
            name: given[name].value() if name in given else flag.default
            for name, flag in known.items()
        }
        asked |= {name: "x" for name, flag in known.items() if flag.is_needed and name not in given}
        path = tmp_path / "config.yaml"
        path.write_text(
            config_file.written(known.values(), asked, given, f"graphs.{graph}", "/here")
        )
        again = config_file.read(path, known, f"graphs.{graph}", graph)
        left = {name: value for name, value in asked.items() if name not in config_file.NOT_KEPT}
        typed = [part for each in again.values() for part in each.as_arguments()]
        assert {name: words.value() for name, words in split(typed, known, graph).items()} | {
            "track": ()
        } == left
        assert {name: words.value() for name, words in again.items()} == left


@pytest.mark.parametrize("columns", [50, 80, 120])
@pytest.mark.parametrize("graph", [*TEXT, *OWN])
def test_help_names_every_flag_once_within_the_terminal_and_what_everyone_needs_first(
    graph: str, columns: int
) -> None:
    known = every(graph)
    text = page(f"python -m graphs.{graph}", "Train.", known.values(), columns)
    lines = text.splitlines()
    assert all(len(line) <= columns or len(line.split()) == 1 for line in lines if columns >= 80)
    assert all(
        len(re.findall(rf"^  {flag.option}( |$)", text, re.MULTILINE)) == 1
        for flag in known.values()
        if not (flag.is_switch and flag.default is True)
    )
    if graph in TEXT:
        assert all(flag.help for flag in known.values()), [
            flag.name for flag in known.values() if not flag.help
        ]
    headings = [
        line for line in lines[lines.index("Train.") + 1 :] if line and not line.startswith(" ")
    ]
    assert headings[0] == FIRST and len(headings) == len(set(headings))


def test_help_is_told_without_torch_and_to_a_reader_who_has_enough(tmp_path: Path) -> None:
    program = (
        "import sys; from graphs.aipo import build; from dataflow import main\n"
        "try: main(build, args=['--help'])\n"
        "finally: print('torch' in sys.modules, 'yaml' in sys.modules, file=sys.stderr)"
    )
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=write_end, stderr=subprocess.PIPE, text=True
    )
    os.close(write_end)
    assert done.stderr.split() == ["False", "False"]


def test_the_command_line_goes_before_the_file_and_the_file_before_the_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("policy: p\nlr: 1\nkl: 2\nexplain: true\n")
    seen: list[tuple[Task, float]] = []

    def build(*, task: Task, kl: float = 0.0) -> Graph:
        seen.append((task, kl))
        raise GraphError("seen")

    for words in (["--kl", "3"], ["--no-chat", "--lr=4"]):
        (tmp_path / "run.yaml").write_text("policy: p\nlr: 1\nkl: 2\nchat: true\n")
        with pytest.raises(SystemExit):
            main(build, args=["--config", str(tmp_path / "run.yaml"), *words])
    wanted = Task(policy="p", lr=1.0, chat=True)
    assert seen == [(wanted, 3.0), (replace(wanted, lr=4.0, chat=False), 2.0)]


def test_a_flag_that_has_to_be_given_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(build, args=[])
    assert ended.value.code == 2 and "needs --policy; write" in capsys.readouterr().err


def test_a_kind_that_no_flag_can_be_is_named() -> None:
    def odd(*, call: Graph) -> Graph:
        raise AssertionError

    with pytest.raises((FlagError, tyro.constructors.UnsupportedTypeAnnotationError), match="call"):
        split(["--call", "x"], Declared.of(odd).flags, "odd")["call"].value()
