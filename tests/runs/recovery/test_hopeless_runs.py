"""What no restart mends ends a run at once, or keeps it from starting; and a run that learns
nothing says so.
"""

import json
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rigs.graphs import fake_graph, tiny_graph

from dataflow import Array, GraphError, Model, RunError, inline, keep, run, scorer
from dataflow.folder.faults import FILE
from dataflow.folder.run_folder import RunFolder
from dataflow.history.summary import summarize
from dataflow.runtime import Context, Runtime
from dataflow.testing import FakeGenerator
from operators.rewards import find

pytestmark = [pytest.mark.usefixtures("machine", "one_core"), pytest.mark.timeout(180)]


@scorer(isolate=False, name="reward")
def never_a_number(completion: str) -> float:
    return float("nan")


@scorer(isolate=False, name="reward")
def the_same(completion: str) -> float:
    return 0.5


@keep(isolate=False)
def undecided(reward: Array) -> bool:
    return bool(reward.max() > reward.min())


def faults(runs: Path) -> list[dict[str, Any]]:
    (folder,) = (each for each in runs.iterdir() if not each.is_symlink())
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_rewards_that_are_never_numbers_end_the_run_at_once_with_the_users_line(
    policy: Path, tmp_path: Path
) -> None:
    graph = tiny_graph(policy, scorers=(never_a_number,), max_tokens=2)
    with pytest.raises(
        RunError,
        match=(
            r"dropped 16 groups.*reward: unusable: returned"
            r" nan.*test_hopeless_runs\.py:\d+.*restart would not"
        ),
    ):
        run(graph, steps=4, runs=tmp_path, quiet=True)
    assert [(fault["worker"], fault["attempt"]) for fault in faults(tmp_path)] == [("trainer-0", 0)]


def test_a_filter_that_drops_all_ends_the_run_at_once_and_the_silent_scorer_is_named(
    policy: Path, tmp_path: Path
) -> None:
    graph = tiny_graph(policy, scorers=(the_same, undecided), max_tokens=2)
    wanted = (
        r"found {'undecided': 65}, in each of them 'reward' \(.*test_hopeless_runs\.py:\d+\) gave"
        r" all rollouts the "
    )
    with pytest.raises(
        RunError, match=wanted + r"same, such as reward 0\.5 for the completion '.*' of '.*='"
    ):
        run(graph, steps=4, runs=tmp_path, quiet=True)
    assert [(fault["worker"], fault["attempt"]) for fault in faults(tmp_path)] == [("trainer-0", 0)]


@pytest.mark.usefixtures("one_core")
def test_a_run_whose_answers_hold_no_number_says_that_it_learns_nothing(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [{"prompt": f"{letter}=", "answer": "blue"} for letter in "abcdefgh"]
    graph = tiny_graph(policy, prompts=prompts, scorers=(find("number"),), max_tokens=2)
    result = run(graph, steps=4, on=inline(), runs=tmp_path)
    out, err = capsys.readouterr()
    folder = RunFolder.open(result.folder)
    said = (
        f"nothing to learn from: 'reward' ({find('number').where}) gave all rollouts of a group the"
        " same value in all"
    )
    assert f"{said} 12 groups of 3 steps" in out, "on the way"
    assert f"{said} 16 groups of 4 steps" in summarize(folder, "", True).signal
    assert "such as reward 0.0 for the completion " in out
    assert "no signal" in "".join(path.read_text() for path in folder.logs.glob("*")) + out + err


@pytest.mark.usefixtures("one_core")
def test_a_run_that_has_a_signal_says_nothing_of_the_kind(policy: Path, tmp_path: Path) -> None:
    result = run(tiny_graph(policy), steps=3, on=inline(), runs=tmp_path, quiet=True)
    assert summarize(RunFolder.open(result.folder), "", True).signal == ""


# Before anything is started


def broken(folder: Path, what: str) -> str:
    """A folder that is no model to train."""
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    match what:
        case "no folder":
            return str(folder / "nowhere")
        case "no config":
            (folder / "config.json").unlink()
        case "torn config":
            (folder / "config.json").write_text('{"model_type": ')
        case "no kind":
            (folder / "config.json").write_text("{}")
        case "an encoder":
            (folder / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
        case "no weights":
            (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        case "torn weights":
            (folder / "model.safetensors").write_bytes(b"\xff" * 20)
        case "a shard is missing":
            (folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "model-1.safetensors"}}'
            )
    return str(folder)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no folder", "there is no folder .*nowhere; give a folder"),
        ("no config", "has no config.json, only"),
        ("torn config", "config.json is no JSON .*copy it again"),
        ("no kind", "names no model_type"),
        ("an encoder", "a 't5' reads with an encoder; give a decoder"),
        ("no weights", "has no weights in safetensors, only .*pytorch_model.bin.*save_pretrained"),
        ("torn weights", "model.safetensors is torn or no safetensors file.*copy it again"),
        ("a shard is missing", "names 1 shards but .'model-1.safetensors'. are not in"),
    ],
)
def test_a_model_that_cannot_be_loaded_keeps_a_run_from_starting(
    tmp_path: Path, what: str, said: str
) -> None:
    folder, runs = tmp_path / "model", tmp_path / "runs"
    folder.mkdir()
    graph = tiny_graph(Path(broken(folder, what)))
    with pytest.raises(GraphError, match=f"model '.*' cannot be loaded: .*{said}") as found:
        run(graph, runs=runs, steps=1, quiet=True)
    assert not runs.exists() and not getattr(found.value, "__notes__", [])


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.jsonl.gz", "x.csv"])
def test_a_file_of_prompts_that_cannot_be_read_is_refused_with_the_graph(
    policy: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_bytes(b"neither one nor the other")
    with pytest.raises(GraphError, match=f"{name}.*(cannot be read as|is not read)"):
        run(
            tiny_graph(policy, prompts=tmp_path / name), runs=tmp_path / "runs", steps=1, quiet=True
        )
    assert not (tmp_path / "runs").exists()


_REFUSED = """
import sys
from pathlib import Path
sys.path[:0] = ["tests"]
from rigs.graphs import tiny_graph
from dataflow import GraphError, run
try:
    run(tiny_graph(Path("/nowhere/at/all")), runs="/nowhere/runs", quiet=True)
except GraphError as error:
    print("torch" in sys.modules, "transformers" in sys.modules, error)
"""


@pytest.mark.slow
def test_what_keeps_a_run_from_starting_is_found_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _REFUSED], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("False False model 'all' cannot be loaded"), done


@dataclass(frozen=True, eq=False)
class Unbuilt(FakeGenerator):
    """Cannot be built."""

    def build(self, context: Context) -> Runtime:
        raise ValueError("not today")


def test_a_run_that_never_began_is_not_to_be_gone_on_with(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not today") as found:
        run(fake_graph(generator=Unbuilt(model=Model("fake-policy"))), runs=tmp_path, quiet=True)
    assert not getattr(found.value, "__notes__", [])


def test_a_run_that_began_is(policy: Path, tmp_path: Path) -> None:
    graph = tiny_graph(policy, scorers=(never_a_number,), max_tokens=2)
    with pytest.raises(RunError) as found:
        run(graph, steps=4, on=inline(), runs=tmp_path, quiet=True)
    assert any("go on with" in note for note in found.value.__notes__)
