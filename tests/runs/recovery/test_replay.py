"""Replays: the Arrow files of a run train to the same losses again, and say what another loss would
have done.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from rich.console import Console
from rigs.graphs import fake_graph, tiny_graph

from dataflow import Devices, Graph, GraphError, Result, RunError, cli, inline, run
from dataflow.folder.arrow_reading import read_arrow
from dataflow.folder.finished import SealedWriter
from dataflow.folder.run_folder import RunFolder, write_arrow
from dataflow.history.launch import Wishes
from dataflow.history.replay import Compared, replay, report_replay, starting_point
from dataflow.history.rollout_view import find_rollout, show_rollout, vocabulary_of
from dataflow.system.files import RunFolderError

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]

STEPS = 4


def graph_of(policy: Path) -> Graph:
    return tiny_graph(
        policy,
        max_staleness=1,
        eval_every=STEPS,
        checkpoint_every=2,
        schedule="linear",
        max_tokens=12,
    )


@pytest.fixture(scope="module")
def done(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Result]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["dataflow.runner"], "this_machine", lambda: Devices(cpus=1))
        folder = tmp_path_factory.mktemp("replayed")
        yield run(graph_of(policy), steps=STEPS, on=inline(), runs=folder, quiet=True)


@pytest.fixture
def copied(done: Result, tmp_path: Path) -> RunFolder:
    """The run, to be spoilt."""
    return RunFolder.open(shutil.copytree(done.folder, tmp_path / "copied"))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "ledger" not in path.name
    }


def compared(policy: Path, folder: Path, **how: Any) -> list[Compared]:
    return list(replay(graph_of(policy), Wishes(run=str(folder), **how)))


def test_a_replay_gives_the_recorded_losses_bit_for_bit_and_leaves_the_run_as_it_was(
    done: Result, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(done.folder)
    assert report_replay(graph_of(policy), Wishes(run=str(done.folder))) == 0
    said = capsys.readouterr().out
    assert "4 of 4 losses are the recorded ones, bit for bit" in said
    assert "no tokens have other log-probabilities than the trainer computed in the run" in said
    assert contents(done.folder) == before


def test_a_replay_starts_from_the_newest_good_checkpoint_at_or_before_its_first_step(
    copied: RunFolder, policy: Path
) -> None:
    checkpoints = copied.checkpoints
    assert starting_point(checkpoints, 3) == (2, checkpoints.folder(2))
    assert starting_point(checkpoints, 1) == (0, None)
    found = compared(policy, copied.path, first=3, last=3)
    assert [each.step for each in found] == [3] and found[0].difference == 0.0
    (checkpoints.folder(2) / "model.safetensors").write_bytes(b"torn")
    assert starting_point(checkpoints, 3) == (0, None)


def test_another_loss_trains_on_the_same_rollouts_and_is_no_failure(
    done: Result, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "def pull(new_logprobs, logprobs, advantage):\n    return -2 * advantage * (new_logprobs -"
        " logprobs).exp()\n"
    )
    wishes = Wishes(
        run=str(done.folder), loss=f"{tmp_path}/mine.py:pull", json=True, out=str(tmp_path / "out")
    )
    assert report_replay(graph_of(policy), wishes) == 0
    told = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in told["steps"]] == [1, 2, 3, 4]
    assert all(step["loss"] != step["recorded_loss"] for step in told["steps"])

    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "step-000004")


def test_losses_that_do_not_repeat_end_with_status_1(
    copied: RunFolder, policy: Path, capsys: Any
) -> None:
    path = copied.rollouts_of().step_file(2)
    table = read_arrow(path)
    at = table.column_names.index("advantage")
    write_arrow(path, table.set_column(at, table.field(at), pc.multiply(table.column(at), -1.0)))
    assert report_replay(graph_of(policy), Wishes(run=str(copied.path), last=2)) == 1
    assert "1 of 2 losses are the recorded ones" in capsys.readouterr().out
    assert report_replay(graph_of(policy), Wishes(run=str(copied.path), last=2, tolerance=1e9)) == 0


def test_rollouts_that_the_ledger_does_not_name_are_refused(
    copied: RunFolder, policy: Path
) -> None:
    copied.rollouts_of().step_file(1).write_bytes(copied.rollouts_of().step_file(2).read_bytes())
    with pytest.raises(RunFolderError, match="holds other groups than step 1 trained"):
        compared(policy, copied.path)


def test_what_cannot_be_replayed_is_refused(done: Result, policy: Path, tmp_path: Path) -> None:
    for how, error, match in (
        ({"last": 9}, RunError, "made 4 steps, so none can be replayed up to 9"),
        ({"first": 4}, RunError, "nothing is left to train"),
        (
            {"trainer": "critic"},
            GraphError,
            r"'critic' is none; give --trainer one of \['trainer'\]",
        ),
        ({"loss": "dr_grpu"}, GraphError, "did you mean 'dr_grpo'"),
        ({"loss": "kl_to_reference"}, (RunError, GraphError), "kl_to_reference"),
        ({"out": str(done.folder / "more")}, RunError, "writes nothing into the run's folder"),
    ):
        with pytest.raises(error, match=match):
            compared(policy, done.folder, **how)
    with pytest.raises(GraphError, match="it is not the one that it began with"):
        list(replay(tiny_graph(policy), Wishes(run=str(done.folder))))
    fakes = run(fake_graph(), on=inline(), steps=1, runs=tmp_path, quiet=True)
    with pytest.raises(GraphError, match="'trainer' is a FakeTrainer, which cannot replay"):
        list(replay(fake_graph(), Wishes(run=str(fakes.folder))))


def test_wishes_travel_on_a_command_line() -> None:
    wishes = Wishes(run="runs/a b", first=3, loss="dr_grpo", tolerance=1e-3, json=True)
    assert Wishes.split_off(["--policy", "p", *wishes.as_arguments()]) == (
        ["--policy", "p"],
        wishes,
    )
    assert Wishes.split_off(["--policy", "p"]) == (["--policy", "p"], None)


# One rollout


def test_a_rollout_is_found_in_the_file_of_its_step_with_its_outcome(done: Result) -> None:
    folder = RunFolder.open(done.folder)
    table = folder.rollouts_of().read(2)
    row = table.to_pylist()[3]
    found = find_rollout(folder, row["rollout_id"], source="prompts")
    assert (found.source, found.place, dict(found.row)) == (
        "prompts",
        "rollouts/step-000002.arrow",
        row,
    )
    assert [str(fate) for fate in found.fates] == ["trained by trainer at step 2"]


def test_a_rollout_id_of_two_sources_is_refused_until_one_is_chosen(done: Result) -> None:
    folder = RunFolder.open(done.folder)
    with pytest.raises(
        RunError,
        match=r"stands in several sources: \['held_out', 'prompts'\]; choose one with --source",
    ):
        find_rollout(folder, 0)
    found = find_rollout(folder, 0, source="held_out")
    assert [str(fate) for fate in found.fates] == ["evaluated by eval at step 0"]
    with pytest.raises(RunError, match="has no rollout 0 of source 'prompts' of group 9"):
        find_rollout(folder, 0, source="prompts", group_id=9)


def test_a_rollout_that_is_finished_and_not_trained_is_found_too(copied: RunFolder) -> None:
    table = copied.rollouts_of().read(1)
    rows = table.slice(0, 1).set_column(
        table.column_names.index("rollout_id"), "rollout_id", pa.array([4242], pa.int64())
    )
    place = copied.finished("generator") / "0-0-0.prompts.arrows"
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("wb") as sink:
        SealedWriter(sink, rows.schema).write_batch(rows.to_batches()[0])
    found = find_rollout(copied, 4242)
    assert (found.source, found.place) == ("prompts", "finished/generator/0-0-0.prompts.arrows")


def test_a_rollout_is_printed_with_its_text_scores_tokens_and_versions(
    done: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.open(done.folder)
    row = folder.rollouts_of().read(2).to_pylist()[0]
    found = find_rollout(folder, row["rollout_id"], source="prompts")
    console = Console(width=100, record=True, file=sys.stdout)
    show_rollout(found, console, vocabulary_of(folder))
    said = capsys.readouterr().out
    for part in (
        row["prompt"],
        row["completion"],
        f"{row['reward']:.6g}",
        "trained by trainer at step 2",
    ):
        assert part in said
    chosen = [at for at, mask in enumerate(row["mask"]) if mask]
    assert said.count(" v") >= len(chosen) and f"{row['logprobs'][chosen[0]]:.3f} v" in said
    assert cli.replay(done.folder, rollout=row["rollout_id"], source="prompts", json=True) == 0
    assert json.loads(capsys.readouterr().out)["rollout"]["tokens"] == row["tokens"]
