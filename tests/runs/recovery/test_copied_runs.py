"""Runs whose checkpoints are copied to an address: what is there is enough for a host that never
saw the run folder.
"""

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rigs.graphs import fake_graph, losses, tiny_graph

from dataflow import Graph, GraphError, RunError, cli, inline, run, verify
from dataflow.errors import OperatorError
from dataflow.folder.checkpoints import MARKER
from dataflow.folder.copies import store as copies_module
from dataflow.folder.copies.process import bring_back
from dataflow.folder.copies.store import CONFIG, LEDGER, Address, Copies, CopyError, Store, TakenUp
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import described
from dataflow.history.launch import Launch, check_owner
from dataflow.history.summary import summarize
from dataflow.limits import Limits

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.timeout(180)]


def graph_of(policy: Path, **how: Any) -> Graph:
    return tiny_graph(
        policy, max_staleness=0, eval_every=2, max_tokens=8, **({"checkpoint_every": 2} | how)
    )


def copies_of(folder: Path) -> Copies:
    return msgspec.convert(described(RunFolder.open(folder))[1][CONFIG], Copies)


def store_of(folder: Path) -> Store:
    copies = copies_of(folder)
    return Store(copies.at(Address.of(copies.address)))


def trained(folder: Path) -> list[tuple[int, list[int]]]:
    with Ledger.open(folder / "ledger.db", readonly=True) as ledger:
        return [(step.step, list(step.trained)) for step in ledger.steps("trainer")]


def test_a_host_that_never_saw_the_folder_goes_on_from_the_address_as_the_run_would(
    policy: Path, tmp_path: Path
) -> None:
    whole = run(graph_of(policy), steps=6, on=inline(), runs=tmp_path / "whole", quiet=True)
    begun = run(
        graph_of(policy),
        steps=4,
        on=inline(),
        runs=tmp_path / "one",
        quiet=True,
        keep_steps=0,
        checkpoint_to=str(tmp_path / "there"),
    )
    store = store_of(begun.folder)
    assert store.whole() == [2, 4]
    marker = store.marker(4)
    files = set(
        json.loads((RunFolder.open(begun.folder).checkpoints.folder(4) / MARKER).read_text())[
            "files"
        ]
    )
    assert set(marker["files"]) == files | {LEDGER}
    before = trained(begun.folder)
    shutil.rmtree(tmp_path / "one")

    folder = bring_back(str(tmp_path / "there"), tmp_path / "two")
    assert folder.path.name == begun.folder.name and verify(folder.path).clean
    assert trained(folder.path) == before
    done = run(graph_of(policy), steps=6, on=inline(), resume=folder.path, quiet=True)
    assert done.verdict.clean, done.verdict
    assert losses(done.folder) == losses(whole.folder)
    assert copies_of(done.folder).part == 2 and store_of(done.folder).whole() == [4, 6]
    assert verify(done.folder).clean


@pytest.mark.slow
def test_steps_after_the_copied_checkpoint_are_taken_back_and_none_is_trained_twice(
    policy: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    begun = run(
        graph_of(policy),
        steps=5,
        on=inline(),
        runs=tmp_path / "one",
        quiet=True,
        checkpoint_to=str(there),
    )
    store = store_of(begun.folder)
    for step in (2, 5):  # as if the host had died while it copied them
        store.place.remove(f"step-{step:06d}/{MARKER}")
    # the copy that came with step 4 knows step 5
    with Ledger.open(begun.folder / "ledger.db") as ledger:
        ledger.pack(there / "later")
    with (there / "later").open("rb") as later:
        facts = store.place.put(f"step-000004/{LEDGER}", later)
    marker = store.marker(4)
    store.place.put_json(
        f"step-000004/{MARKER}", {**marker, "files": {**marker["files"], LEDGER: facts}}
    )
    (there / "later").unlink()

    folder = bring_back(str(there), tmp_path / "two")
    assert folder.checkpoints.steps() == [4]
    done = run(graph_of(policy), steps=6, on=inline(), resume=folder.path, quiet=True)
    assert done.verdict.clean, done.verdict
    groups = [group for _, groups in trained(done.folder) for group in groups]
    assert [step for step, _ in trained(done.folder)] == [1, 2, 3, 4, 5, 6] and len(groups) == len(
        set(groups)
    )
    with Ledger.open(done.folder / "ledger.db", readonly=True) as ledger:
        assert ledger.counts("trainer").missing == 0


@pytest.mark.slow
def test_who_was_replaced_at_the_address_goes_on_neither_in_its_folder_nor_in_its_run(
    policy: Path, tmp_path: Path
) -> None:
    there = str(tmp_path / "there")
    begun = run(
        graph_of(policy),
        steps=4,
        on=inline(),
        runs=tmp_path / "one",
        quiet=True,
        checkpoint_to=there,
    )
    bring_back(there, tmp_path / "two")
    with pytest.raises(
        TakenUp, match=r"was taken up from '.*there/tiny-.*' by process \d+ on host '.*', as part 2"
    ):
        run(graph_of(policy), steps=6, on=inline(), resume=begun.folder, quiet=True)
    other = run(
        graph_of(policy),
        steps=5,
        on=inline(),
        resume=begun.folder,
        quiet=True,
        checkpoint_to=str(tmp_path / "other"),
    )
    assert copies_of(other.folder).part == 1 and store_of(other.folder).whole() == [4, 5]
    nowhere = run(
        graph_of(policy), steps=6, on=inline(), resume=begun.folder, quiet=True, checkpoint_to=""
    )
    assert described(RunFolder.open(nowhere.folder))[1][CONFIG] is None
    # part 2 has copied nothing yet: from part 1 again
    third = bring_back(there, tmp_path / "three")
    assert copies_of(third.path).part == 3


def test_a_run_that_is_replaced_while_it_runs_ends_and_says_by_whom(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, brought = str(tmp_path / "there"), []
    take_back = Store.take_back

    def taken_up_meanwhile(self: Store, last: int) -> None:
        take_back(self, last)
        if not brought:
            place = Address.of(there)
            [name] = place.names()
            brought.append(copies_module.claim(place, there, name, [""], 1))

    monkeypatch.setattr(Store, "take_back", taken_up_meanwhile)
    with pytest.raises(
        OperatorError, match="'trainer' copies no checkpoint any more: .* as part 2 where this one"
    ):
        run(
            graph_of(policy),
            steps=50,
            on=inline(),
            runs=tmp_path / "one",
            quiet=True,
            checkpoint_to=there,
        )


def test_an_address_that_takes_nothing_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for address, why in (
        (
            str(tmp_path / "file/below"),
            (
                "checkpoints cannot go to '.*file/below', .*Not a directory; look whether it is"
                " reached"
            ),
        ),
        (
            "nowhere://bucket",
            "checkpoints cannot go to 'nowhere://bucket': .*; give a path, or an address as",
        ),
        ("s3://me:secret@bucket/a", r"'s3://...@bucket' holds a password, .*; leave it out"),
        ("abfs://c@host/a?client_secret=b", r"'abfs://...@host' holds a password, .*; leave it"),
    ):
        with pytest.raises(GraphError, match=why) as refusal:
            run(
                fake_graph(),
                steps=2,
                on=inline(),
                runs=tmp_path / "runs",
                quiet=True,
                checkpoint_to=address,
            )
        assert "secret" not in str(refusal.value)
    assert [path for path in (tmp_path / "runs").glob("*") if not path.is_symlink()] == []


def test_an_address_that_does_not_answer_is_refused_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataflow.folder.copies.process.ANSWER_S", 1.0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        address = f"s3://bucket/a?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        with pytest.raises(
            GraphError, match=r"it did not answer within 1 s; look whether it is reached"
        ):
            run(
                fake_graph(),
                steps=2,
                on=inline(),
                runs=tmp_path / "runs",
                quiet=True,
                checkpoint_to=address,
            )


@pytest.mark.slow
def test_a_folder_that_is_there_is_not_overwritten_and_an_address_without_a_run_is_refused(
    policy: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    begun = run(
        graph_of(policy), steps=2, on=inline(), runs=tmp_path, quiet=True, checkpoint_to=str(there)
    )
    with pytest.raises(RunError, match=r"is there already, .* go on with it \(dataflow resume"):
        bring_back(str(there), tmp_path)
    with pytest.raises(RunError, match="there is no whole checkpoint at"):
        bring_back(str(tmp_path / "empty"), tmp_path / "two")
    with pytest.raises(
        GraphError, match="has checkpoints of a run of this name; give the address as"
    ):
        copies_module.claim(Address.of(str(there)), str(there), begun.folder.name, [""], None)
    shutil.copytree(there / begun.folder.name, there / "other-1")
    with pytest.raises(
        RunError,
        match=r"holds 2 runs: other-1, tiny-.*; give the address of one, as in .*there/tiny-",
    ):
        bring_back(str(there), tmp_path / "two")
    assert bring_back(str(there / "other-1"), tmp_path / "two").path.name == "other-1"


@pytest.mark.slow
def test_a_run_whose_address_fails_goes_on_and_a_resume_copies_what_is_missing(
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object) -> None:
        raise CopyError("writing 'there' failed: the network is down")

    how: dict[str, Any] = {"on": inline(), "quiet": True}
    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", refuse)
        begun = run(
            graph_of(policy),
            steps=4,
            runs=tmp_path,
            checkpoint_to=str(tmp_path / "there"),
            limits=Limits(copy_s=0.3),
            **how,
        )
    assert begun.verdict.clean and begun.steps == 4 and store_of(begun.folder).whole() == []
    output = capsys.readouterr().err
    assert "checkpoint not copied, and tried again" in output and "the network is down" in output
    assert "the last checkpoint is in the run folder, and was not copied" in output
    done = run(graph_of(policy), steps=5, resume=begun.folder, **how)
    assert store_of(done.folder).whole() == [4, 5]


@pytest.mark.slow
def test_resume_from_starts_the_program_in_a_folder_of_its_own_and_trusts_no_stranger(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    launch = Launch(module="graphs.sorting", folder=str(tmp_path), arguments=("--quiet",))
    begun = run(
        graph_of(policy),
        steps=2,
        on=inline(),
        runs=tmp_path,
        quiet=True,
        checkpoint_to=str(there),
        launch=launch,
    )
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: started.append(command))
    monkeypatch.setattr(os, "chdir", lambda path: None)
    name = begun.folder.name
    cli.resume(steps=4, from_=f"file://{there}/{name}", runs=tmp_path / "two")
    folder = tmp_path / "two" / name
    commands = [command for command, _ in summarize(RunFolder.open(folder), "", True).commands]
    assert any(f"resume --from '{there}/{name}'" in command for command in commands)
    assert started[0][1:] == [
        "-m",
        "graphs.sorting",
        "--quiet",
        "--steps",
        "4",
        "--resume",
        str(folder),
    ]
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(
        RunError, match=r"belongs to .*, and what it names would run with your rights"
    ):
        cli.resume(steps=4, from_=str(there), runs=tmp_path / "three")
    monkeypatch.undo()
    with pytest.raises(
        RunError, match=r"belongs to whoever may write at 's3://b', .* or give --trust"
    ):
        check_owner(
            RunFolder.open(folder),
            launch,
            False,
            ["belongs to whoever may write at 's3://b'"],
            lambda question: False,
        )
