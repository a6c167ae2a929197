"""The pages a stranger reads first: short, with links that lead somewhere, and a tour that fits in
an afternoon.
"""

import inspect
import json
import re
import shlex
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
import tyro

from dataflow import Graph, main
from dataflow.cli import COMMANDS
from dataflow.flags.declared import Declared
from dataflow.flags.run_flags import RUN_FLAGS
from graphs import aipo

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "graphs" / "README.md",
        ROOT / "bench" / "README.md",
    ]
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


@pytest.mark.parametrize(
    ("name", "command"), [each for group in COMMANDS.values() for each in group.items()]
)
def test_every_command_is_in_its_page_with_its_flags(
    name: str, command: Callable[..., int]
) -> None:
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


TOUR = (ROOT / "docs" / "tour.md").read_text()
STOPS = re.findall(r"^\| \d+ \| `([^`]+)` \|(.*)$", TOUR, re.MULTILINE)
"""File, and what is said of it."""
FOLLOWED = re.findall(r"^\| \| `([^`]+)` \|(.*)$", TOUR, re.MULTILINE)
"""The same of the ways of an error and of a crash."""


def test_the_tour_fits_in_an_afternoon() -> None:
    """At most 20 files and 6,100 lines."""
    files = {file for file, _ in STOPS}
    assert 15 <= len(files) == len(STOPS) <= 20
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) <= 6100


@pytest.mark.parametrize(
    ("file", "said"), [*STOPS, *FOLLOWED], ids=lambda each: each if each.endswith(".py") else ""
)
def test_what_the_tour_says_to_look_at_is_there(file: str, said: str) -> None:
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", said))))
    assert words <= set(re.findall(r"\w+", (ROOT / file).read_text()))


def test_every_flag_of_a_run_and_every_group_of_flags_is_in_the_page_of_commands() -> None:
    under = CLI.partition("\n## A graph's file\n")[2]
    for flag in (*RUN_FLAGS, *Declared.of(aipo.build).flags.values()):
        (row,) = re.findall(rf"^\| {re.escape(flag.heading)} \|(.*)$", under, re.MULTILINE)
        assert re.search(rf"`{flag.option}\b", row), flag.option


COMMANDS_OF_README = [
    " ".join(each.replace("\\\n", " ").split())
    for each in re.findall(r"^    (python -m graphs\.aipo (?:.*\\\n)*.*)$", README, re.MULTILINE)
]
SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
"""What their config.json says."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "more", "devices", "gib", "step_s"),
    [
        (0, "", "1xH100", 15, 2.9),
        (0, "--lora --lr 1e-5", "1xRTX4090", 10, 6.3),
        (0, "--lora --lr 1e-5", "1xA10G", 10, 12),
        (1, "", "8xH100", 51, 4.2),
    ],
)
def test_the_commands_of_the_readme_are_taken_and_take_what_it_says(
    command: int,
    more: str,
    devices: str,
    gib: float,
    step_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*shlex.split(COMMANDS_OF_README[command])[3:], *more.split()]
    policy = words[words.index("--policy") + 1]
    Path(policy).mkdir(parents=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
    }
    Path(policy, "config.json").write_text(json.dumps(config | SHAPES[policy]))
    Path("rows.jsonl").write_text('{"question": "2+2=", "answer": "#### 4"}\n' * 7473)
    words = ["rows.jsonl" if word.startswith("hf:openai/gsm8k") else word for word in words]
    main(aipo.build, args=[*words, "--foresee", devices, "--workload", "mean=200,prompt=130"])
    told = capsys.readouterr().out
    fullest = max(float(each) for each in re.findall(r"(?<=  )([\d.]+) GiB of", told))
    assert fullest == pytest.approx(gib, rel=0.05)
    found = re.search(r"a step of \d+ rollouts takes ([\d.]+) s", told)
    assert found and float(found[1]) == pytest.approx(step_s, rel=0.05)
    assert all(f"{each:g}" in README for each in (gib, step_s))
