"""The pages a stranger reads first: short, with links that lead somewhere, and a tour that fits in an afternoon."""

import inspect
import re
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
import tyro

from dataflow import Graph
from dataflow.cli import COMMANDS
from dataflow.flags.declared import Declared
from dataflow.flags.run_flags import RUN_FLAGS
from graphs import aipo

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "graphs" / "README.md", ROOT / "bench" / "README.md"]
)


README = (ROOT / "README.md").read_text()
CLI = (ROOT / "docs" / "cli.md").read_text()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 100


def test_the_program_of_the_readme_is_a_graph(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    known: dict[str, typing.Any] = {"__name__": "readme"}
    exec(compile(program, "README.md", "exec"), known)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    graph: Graph = known["build"](policy="policy", prompts=str(tmp_path / "prompts.jsonl"))
    graph.check()


@pytest.mark.parametrize(("name", "command"), [each for group in COMMANDS.values() for each in group.items()])
def test_every_command_is_in_its_page_with_its_flags(name: str, command: Callable[..., int]) -> None:
    lines = [line for line in CLI.splitlines() if re.match(rf"\| `dataflow {name}\b", line)]
    assert lines
    hints = typing.get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters:
        said = getattr(hints[parameter], "__metadata__", ())
        if tyro.conf.Positional not in said:
            named = [each.name for each in said if getattr(each, "name", None)]
            option = f"--{(named or [parameter])[0].replace('_', '-')}"
            assert any(re.search(rf"{option}\b", line) for line in lines), option


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


STOPS = re.findall(r"^\| \d+ \| `([^`]+)` \|(.*)$", (ROOT / "docs" / "tour.md").read_text(), re.MULTILINE)
"""File, and what is said of it."""


def test_the_tour_fits_in_an_afternoon() -> None:
    """At most 20 files and 4,500 lines."""
    files = {file for file, _ in STOPS}
    assert 15 <= len(files) == len(STOPS) <= 20
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) <= 4500


@pytest.mark.parametrize(("file", "said"), STOPS, ids=lambda each: each if each.endswith(".py") else "")
def test_what_the_tour_says_to_look_at_is_there(file: str, said: str) -> None:
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", said))))
    assert words <= set(re.findall(r"\w+", (ROOT / file).read_text()))


def test_every_flag_of_a_run_and_every_group_of_flags_is_in_the_page_of_commands() -> None:
    under = CLI.partition("\n## A graph's file\n")[2]
    for flag in (*RUN_FLAGS, *Declared.of(aipo.build).flags.values()):
        (row,) = re.findall(rf"^\| {re.escape(flag.heading)} \|(.*)$", under, re.MULTILINE)
        assert re.search(rf"`{flag.option}\b", row), flag.option
