"""Runs that keep the rollouts of their last steps alone: what recovery needs stays, and what went
is accounted for.
"""

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rigs.graphs import fake_graph, losses, tiny_graph

from dataflow import Graph, GraphError, RunError, cli, inline, run, verify
from dataflow.errors import DataflowError
from dataflow.folder.arrow_reading import read_arrow
from dataflow.folder.checkpoints import MARKER
from dataflow.folder.ledger import Ledger
from dataflow.folder.retention import FACT, gone, removable
from dataflow.folder.run_folder import COMPRESSED_BYTES, RunFolder, write_arrow
from dataflow.history.launch import Wishes
from dataflow.history.replay import replay
from dataflow.history.summary import summarize
from dataflow.history.verify.facts import read_facts
from dataflow.system.files import Extras

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]

EVERY = 2


def graph_of(policy: Path, **how: Any) -> Graph:
    return tiny_graph(
        policy, max_staleness=0, eval_every=2, max_tokens=8, **({"checkpoint_every": EVERY} | how)
    )


def steps_there(folder: Path, kind: str = "step") -> list[int]:
    return [step for step, _ in RunFolder.open(folder).rollouts_of().files(kind)]


# What may go


@pytest.mark.parametrize(
    ("last", "checkpoint", "keep_steps", "staying", "wanted"),
    [
        (100, 90, 0, None, 90),  # recovery needs what comes after the checkpoint
        (100, 90, 5, None, 90),
        (100, 90, 30, None, 70),  # the last 30
        (100, 0, 0, None, 0),  # no checkpoint
        (20, 20, 30, None, 0),
        # a replay of the last 10 begins with the checkpoint of step 50
        (100, 100, 10, [50, 100], 50),
        (100, 100, 10, [100], 0),
        (100, 90, 0, [50, 80, 120], 80),
    ],
)
def test_what_recovery_replay_and_the_last_steps_need_stays(
    last: int, checkpoint: int, keep_steps: int, staying: list[int] | None, wanted: int
) -> None:
    assert (
        removable(last=last, checkpoint=checkpoint, keep_steps=keep_steps, staying=staying)
        == wanted
    )


def test_a_run_that_keeps_little_ends_with_its_last_steps_and_a_clean_ledger_and_goes_on(
    policy: Path, tmp_path: Path
) -> None:
    whole = run(graph_of(policy), steps=9, on=inline(), runs=tmp_path / "whole", quiet=True)
    part = run(
        graph_of(policy), steps=7, on=inline(), runs=tmp_path / "part", quiet=True, keep_steps=1
    )
    assert part.verdict.clean, part.verdict
    assert steps_there(part.folder) == steps_there(part.folder, "eval") == [7]
    assert any(
        "rollouts of 6 steps of 'trainer' up to step 6 were not kept" in note
        for note in part.verdict.notes
    )
    again = run(graph_of(policy), steps=9, on=inline(), resume=part.folder, quiet=True)
    assert again.verdict.clean and steps_there(again.folder) == [9], "it keeps what it kept before"
    assert losses(again.folder) == losses(whole.folder)
    assert steps_there(whole.folder) == list(range(1, 10))


@pytest.mark.slow
def test_a_killed_run_has_all_that_its_catching_up_needs(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after step 7, whose checkpoint is that of step 6."""
    whole = run(graph_of(policy), steps=9, on=inline(), runs=tmp_path / "whole", quiet=True)
    commit = Ledger.commit_step

    def dies(self: Ledger, node: str, step: int, **how: Any) -> None:
        if step == 8:
            raise KeyboardInterrupt
        commit(self, node, step, **how)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Ledger, "commit_step", dies)
        run(
            graph_of(policy), steps=9, on=inline(), runs=tmp_path / "part", quiet=True, keep_steps=0
        )
    folder = (tmp_path / "part" / "latest").resolve()
    assert verify(folder).clean and steps_there(folder)[:2] == [7, 8]
    again = run(graph_of(policy), on=inline(), resume=folder, quiet=True)
    assert again.verdict.clean and losses(folder) == losses(whole.folder)


@pytest.mark.parametrize("dies_before", range(5))
@pytest.mark.slow
def test_a_kill_at_any_moment_of_the_removal_leaves_a_clean_folder(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_before: int
) -> None:
    """Before the entry in the ledger, before its flush, before each file."""
    left = [dies_before]

    def counted(act: Any) -> Any:
        def acts(self: Any, what: Any, *more: Any) -> Any:
            if isinstance(what, dict) and not any(name.startswith(FACT) for name in what):
                return act(self, what, *more)
            if isinstance(what, Path) and what.suffix != ".arrow":
                return act(self, what, *more)
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return act(self, what, *more)

        return acts

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Ledger, "set_facts", counted(Ledger.set_facts))
        patch.setattr(Extras, "remove", counted(Extras.remove))
        run(graph_of(policy), steps=5, on=inline(), runs=tmp_path, quiet=True, keep_steps=0)
    folder = (tmp_path / "latest").resolve()
    assert verify(folder).clean, verify(folder)
    again = run(graph_of(policy), on=inline(), resume=folder, quiet=True)
    assert again.verdict.clean and again.steps == 5
    assert steps_there(folder) == [] and steps_there(folder, "eval") == [5]


# What needs a file that was not kept


def test_what_needs_a_file_that_was_not_kept_says_so_and_what_to_do(
    policy: Path, tmp_path: Path
) -> None:
    done = run(graph_of(policy), steps=6, on=inline(), runs=tmp_path, quiet=True, keep_steps=1)
    assert steps_there(done.folder) == [5, 6]
    with pytest.raises(
        RunError, match=r"up to step 4 were not kept, .* from step 1 on; give --from 4"
    ):
        list(replay(graph_of(policy), Wishes(run=str(done.folder))))
    assert [
        each.difference for each in replay(graph_of(policy), Wishes(run=str(done.folder), first=4))
    ] == [0.0, 0.0]
    with pytest.raises(
        RunError, match=r"of a step of 'trainer' up to 4, which were not kept; .*larger keep_steps"
    ):
        cli.replay(done.folder, rollout=0, source="prompts")
    summary = summarize(RunFolder.open(done.folder), done.verdict.line, done.verdict.clean)
    assert "rollouts of trainer up to step 4 not kept" in summary.not_kept
    assert cli.show(done.folder) == 0


def test_a_run_whose_newest_checkpoint_is_damaged_is_not_taken_back_to_its_start(
    policy: Path, tmp_path: Path
) -> None:
    done = run(
        graph_of(policy, checkpoint_every=None),
        steps=4,
        on=inline(),
        runs=tmp_path,
        quiet=True,
        keep_steps=0,
    )
    for marker in (done.folder / "checkpoints").rglob(MARKER):
        marker.unlink()
    with pytest.raises(
        DataflowError,
        match=r"steps \[1, 2, 3, 4\] after it were not kept .*; take a newer checkpoint",
    ):
        run(
            graph_of(policy, checkpoint_every=None),
            steps=6,
            on=inline(),
            resume=done.folder,
            quiet=True,
        )
    with Ledger.open(done.folder / "ledger.db") as ledger:
        assert ledger.last_step("trainer") == 4


def test_a_file_that_went_by_itself_is_a_fault_as_ever(policy: Path, tmp_path: Path) -> None:
    done = run(graph_of(policy), steps=6, on=inline(), runs=tmp_path, quiet=True, keep_steps=1)
    RunFolder.open(done.folder).rollouts_of().step_file(5).unlink()
    assert "step-000005.arrow" in verify(done.folder).line and not verify(done.folder).clean


def test_a_file_that_goes_while_a_run_under_way_is_judged_is_no_fault(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(graph_of(policy), steps=4, on=inline(), runs=tmp_path, quiet=True)

    def goes_on(folder: RunFolder, findings: Any) -> Any:
        found = read_facts(folder, findings)
        with Ledger.open(folder.ledger) as ledger:
            ledger.set_facts({f"{FACT}/trainer": 2})
        folder.rollouts_of().step_file(2).unlink()
        return found

    monkeypatch.setattr(sys.modules["dataflow.history.verify.verdict"], "read_facts", goes_on)
    assert verify(done.folder).clean, verify(done.folder)


def test_keep_steps_is_no_negative_number(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="0 steps or more, but keep_steps is -1; leave it out"):
        run(fake_graph(), on=inline(), runs=tmp_path, keep_steps=-1)


def test_a_refused_removal_is_told_and_the_run_goes_on(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unlink = Path.unlink

    def refused(self: Path, missing_ok: bool = False) -> None:
        if self.name.startswith("step-"):
            raise PermissionError(13, "Permission denied")
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    done = run(graph_of(policy), steps=4, on=inline(), runs=tmp_path, quiet=True, keep_steps=0)
    assert done.verdict.clean and steps_there(done.folder) == [1, 2, 3, 4]
    assert "removing" in caplog.text and "step-000001.arrow" in caplog.text


# Size


def table(tokens: int) -> pa.Table:
    return pa.table(
        {"tokens": pa.array([list(range(100)) * (tokens // 100)], pa.list_(pa.int32()))}
    )


def test_large_files_are_compressed_small_ones_are_not_and_both_are_read_alike(
    tmp_path: Path,
) -> None:
    small, large = table(1000), table(2 * COMPRESSED_BYTES // 4)
    for name, rows in (("small", small), ("large", large)):
        write_arrow(tmp_path / name, rows)
        assert read_arrow(tmp_path / name).equals(rows)
    assert (tmp_path / "small").stat().st_size > small.nbytes
    assert (tmp_path / "large").stat().st_size < large.nbytes // 4


def test_a_summary_tells_how_large_the_folder_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(fake_graph(), steps=2, on=inline(), runs=tmp_path, quiet=True)
    folder = RunFolder.open(done.folder)
    files = [path for path in done.folder.rglob("*") if path.is_file()]
    assert folder.size_bytes == sum(path.stat().st_size for path in files)
    cli.show(done.folder)
    assert " kB" in capsys.readouterr().out


def test_the_ledger_forgets_no_removal(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.db", {"trainer": ["prompts"]}) as ledger:
        assert gone(ledger, "trainer") == 0
        ledger.set_facts({f"{FACT}/trainer": 3, f"{FACT}/critic": 2, "config": {}})
        assert (gone(ledger, "trainer"), gone(ledger, "critic")) == (3, 2)
