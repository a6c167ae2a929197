"""docs/algorithms.md and docs/gallery.md say what is there: their programs run, their tables are
complete.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.graphs import reward, words
from rigs.user_algorithm import build, tapered

from dataflow import Graph, Model, inline, run
from operators import Generator, Prompts, Trainer, credit, losses
from operators.credit import advantage, gae
from operators.losses import ppo, value_loss, with_entropy, with_kl

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()
GALLERY = (ROOT / "docs" / "gallery.md").read_text()
NAMED = re.compile(r"`([a-z_]+)`")


def programs(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def first_cells(text: str, heading: str) -> list[str]:
    """The first cell of every row of the first table under a heading."""
    under = text.split(heading, 1)[1]
    rows = under[under.index("\n|") :].split("\n\n", 1)[0].strip().splitlines()[2:]
    return [row.split("|")[1] for row in rows]


def known(policy: Path, prompts: Path) -> dict[str, Any]:
    """What the page's programs have at hand: a graph up to rewarded rollouts."""
    g, model = Graph("page"), Model(str(policy), name="policy")
    generator = Generator(model, group_size=4, max_tokens=8)
    rewarded = reward(generator(g.source(Prompts(str(prompts), columns=("answer",)))))
    return {
        "g": g,
        "model": model,
        "generator": generator,
        "rewarded": rewarded,
        "policy": str(policy),
        "Model": Model,
        "prompts": str(prompts),
        "Trainer": Trainer,
        "advantage": advantage,
        "tapered": tapered,
    }


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(
            f'{{"prompt": "{row["prompt"]}", "answer": "{row["answer"]}"}}\n' for row in words(16)
        )
    )
    return path


def test_the_page_quotes_the_file_that_is_tested() -> None:
    assert programs(PAGE)[0] == (ROOT / "tests" / "rigs" / "user_algorithm.py").read_text()


@pytest.mark.parametrize("program", programs(PAGE)[1:])
def test_every_other_program_of_the_pages_makes_a_graph(
    program: str, policy: Path, prompts: Path
) -> None:
    names = known(policy, prompts)
    exec(compile(program, "page", "exec"), names)
    graphs = [value for value in names.values() if isinstance(value, Graph)]
    whole = [
        graph for graph in graphs if any(operator.trains for operator in graph.operators.values())
    ]
    for graph in whole:
        graph.check()
    assert whole or not Trainer(names["model"], loss=names["loss"]).faults()


def test_the_files_own_graph_is_checked(policy: Path, prompts: Path) -> None:
    build(policy=str(policy), prompts=str(prompts)).check()


def test_every_loss_and_every_rule_of_credit_is_named() -> None:
    losses_named = set(NAMED.findall(PAGE.split("## The losses", 1)[1].split("\n## ", 1)[0]))
    assert set(losses.__all__) <= losses_named, set(losses.__all__) - losses_named
    rules = {name for name, value in vars(credit).items() if hasattr(value, "provides")}
    assert rules <= losses_named, rules - losses_named


def test_what_the_table_of_losses_names_exists() -> None:
    for cell in first_cells(PAGE, "## The losses"):
        for name in NAMED.findall(cell):
            assert name in losses.__all__, name


def test_every_figure_that_the_page_explains_is_one_of_a_run(
    policy: Path, prompts: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    names = known(policy, prompts)
    g, model, rewarded = names["g"], names["model"], names["rewarded"]
    from operators import Logprobs, Values

    expected = Model(str(policy), head="value", name="critic")
    values = Values(expected)
    actor = Trainer(model, name="actor", loss=with_entropy(with_kl(ppo)), prompts_per_step=4)
    critic = Trainer(expected, name="critic", loss=value_loss, prompts_per_step=4)
    credited = gae(values(Logprobs(model.frozen())(rewarded)))
    actor(credited)
    critic(credited)
    g.feedback(actor.weights, names["generator"], max_staleness=0)
    g.feedback(critic.weights, values, max_staleness=0)
    result = run(g, steps=1, on=inline(), runs=tmp_path, quiet=True)
    figures = {figure for line in result.metrics for figure in line}
    explained = {
        name
        for cell in first_cells(PAGE, "## What metrics.jsonl says")
        for name in NAMED.findall(cell)
    }
    over_links = {
        "weights_sent_bytes",
        "weights_saved_bytes",
    }  # test_delta_runs.py has a run with them
    assert explained - over_links <= figures, explained - figures
    assert {
        "ratio_mean",
        "ess",
        "kl",
        "kl_reference",
        "entropy",
        "mismatch",
        "explained_variance",
    } <= explained


def test_every_graph_has_its_rows_its_command_and_its_picture_in_the_gallery() -> None:
    files = {path.stem for path in (ROOT / "graphs").glob("*.py")} - {"__init__"}
    ideas = {
        name
        for cell in first_cells(GALLERY, "# Gallery")
        for name in re.findall(r"`(\w+)\.py`", cell)
    }
    seen = {
        name
        for cell in first_cells(GALLERY, "## What they learn")
        for name in re.findall(r"`(\w+)`", cell)
    }
    assert ideas == files and seen == files
    for name in files:
        assert (
            f"\n    python -m graphs.{name}" in GALLERY
            and f"\n![{name}](gallery/{name}.svg)\n" in GALLERY
        )
