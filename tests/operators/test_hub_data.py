"""Data sets on the hub as sources of prompts, and what is said of those that cannot be had."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_rig import NAME, hub

from dataflow import Graph, GraphError, run
from dataflow.model import Model
from dataflow.model_files import start_fault
from dataflow.testing import FakeGenerator, FakeTrainer
from operators import Prompts
from operators.sources.hub import HubData

PROGRAM = """
import sys
from dataflow import Graph, collect
from operators import Prompts
from operators.rewards import find
for source in sys.argv[1:]:
    prompts = Prompts(source, prompt_column="question", columns=("answer",), epochs=1)
    assert prompts.missing() is None, prompts.missing()
    rows = collect(Graph("g").source(prompts), rows=1).to_pylist()
    print(source, rows[0]["prompt"], find("number").function("1 more is 70.", rows[0]["answer"]))
print(Prompts("hf:nobody/nothing").missing())
"""


@pytest.mark.slow
def test_data_of_the_hub_is_read_by_configuration_and_split(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    names = [f"hf:{NAME}", f"hf:{NAME}:test", f"hf:{NAME}/socratic:test"]
    with hub() as address:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *names],
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path)},
        )
    said = done.stdout.splitlines()
    assert said[:3] == [
        f"hf:{NAME} main train 0? 1.0",
        f"hf:{NAME}:test main test 0? 1.0",
        f"hf:{NAME}/socratic:test socratic test 0? 1.0",
    ], done.stderr
    assert "the hub gives no data set of that id" in said[3]


@pytest.mark.parametrize(
    ("source", "config", "split", "wanted"),
    [
        ("hf:gsm8k", None, None, ("gsm8k", None, None, True)),
        ("hf:openai/gsm8k", "main", None, ("openai/gsm8k", "main", None, True)),
        ("hf:openai/gsm8k/main", None, "test", ("openai/gsm8k", "main", "test", True)),
        ("hf:openai/gsm8k:train", None, None, ("openai/gsm8k", None, "train", True)),
        ("openai/gsm8k", None, "test", ("openai/gsm8k", None, "test", False)),
        ("hf:", None, None, None),
        ("hf:a/b/c/d", None, None, None),
        ("hf:a b", None, None, None),
    ],
)
def test_an_id_says_configuration_and_split(
    source: str, config: str | None, split: str | None, wanted: tuple[object, ...] | None
) -> None:
    assert HubData.named(source, config, split) == (wanted and HubData(*wanted))  # type: ignore[arg-type]


def test_of_several_configurations_the_usual_one_is_taken_or_one_has_to_be_named() -> None:
    data = HubData("a/b", None, None, True)
    assert data._configured(["all", "main"]).config == "main"
    assert data._configured(["only"]).config == "only"
    with pytest.raises(Exception, match=r"has the configurations \['x', 'y'\].*hf:a/b/x"):
        data._configured(["x", "y"])


@pytest.mark.parametrize("source", ["nobody/nothing", "hf:nobody/nothing:test"])
def test_what_the_hub_does_not_give_is_refused_before_anything_starts(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`datasets` itself tries for 23 seconds, in each life of the worker."""
    pytest.importorskip("datasets")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    fault = start_fault(Model("nobody/nothing"))
    assert fault is not None and "the hub gives no model of that id (ConnectError" in fault
    g = Graph("g")
    FakeTrainer(prompts_per_step=2)(FakeGenerator()(g.source(Prompts(source))))
    with pytest.raises(
        GraphError,
        match=r"'prompts': 'nobody/nothing' is no file or folder here, and the hub gives",
    ):
        run(g, runs=tmp_path, quiet=True)
    assert not list(tmp_path.iterdir())
