"""Laws of the weight-plane bench: same bytes for all, checked after every update; one failure is
one row.
"""

import json
import threading
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from bench.weight_plane import __main__ as weight_plane
from bench.weight_plane import pair as weight_plane_pair
from bench.weight_plane import rank_ends
from bench.weight_plane import systems as weight_plane_systems
from bench.weight_plane.cases import Case, Job, Seat, UpdateTimes, stalls
from bench.weight_plane.ends import Announcing, Told

SMALL = ["--mib", "1", "--tensors", "3", "--repeats", "1", "--updates", "2"]
CASE = Case(1, 3)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def left_in_shared_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("dataflow-bench-*"))


def lines(path: Path) -> dict[str, dict]:
    return {line["system"]: line for line in map(json.loads, path.read_text().splitlines())}


@pytest.mark.slow
def test_systems_are_measured_in_real_processes_and_leave_nothing_behind(tmp_path, capsys):
    before = left_in_shared_memory()
    path = tmp_path / "lines.jsonl"
    systems = ["memcpy", "gloo_p2p", "ours_shm", "ours_gloo_zero_copy", "gloo", "torch_shared"]
    assert weight_plane.main([*SMALL, "--systems", *systems, "--json", str(path)]) == 0, (
        capsys.readouterr().out
    )
    rows = lines(path)
    assert set(rows) == set(systems)
    for row in rows.values():
        assert (row["mib"], row["tensors"]) == (1, 3)
        assert row["gb_per_s"] > 0 and row["waiting_gb_per_s"] > 0
    for name in set(systems) - {"memcpy"}:
        assert rows[name]["trainer_stall_ms"] > 0 and rows[name]["of_memcpy"] > 0
        assert rows[name]["reader_stall_ms"] is not None
    assert rows["gloo"]["of_gloo"] > 0 and rows["ours_gloo_zero_copy"]["of_gloo"] > 0
    assert "ours_shm of memcpy (goal 0.85)" in capsys.readouterr().out
    assert left_in_shared_memory() == before


def test_several_ranks_on_either_side_are_measured_beside_their_floors(tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    systems = ["memcpy", "raw_gloo", "shared_memory", "gloo"]
    asked = [
        "--ranks",
        "2x2",
        "--mib",
        "2",
        "--updates",
        "2",
        "--rank-systems",
        *systems,
        "--json",
        str(path),
    ]
    assert weight_plane.main(asked) == 0
    rows = lines(path)
    assert set(rows) == {"shared_memory", "gloo"}
    for row in rows.values():
        assert (row["case"], row["mib"]) == ("2x2", 2) and row["processor"]
        assert 0 < row["held_ms"] < row["ms"] and row["over_floor"] > 0 < row["least_over"]
    assert "2x2, 2 MiB, shared_memory: " in capsys.readouterr().out


@pytest.mark.slow
def test_a_live_run_tells_how_long_its_versions_took_and_held_their_reader(tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    assert weight_plane.main(["--live", "2x2", "--mib", "8", "--json", str(path)]) == 0
    rows = lines(path)
    assert set(rows) == {"shared_memory", "gloo"}
    for row in rows.values():
        assert row["versions"] > 3 and 8e6 < row["nbytes"] < 32e6
        assert 0 < row["least_ms"] <= row["ms"] and row["held_ms"] > 0 and row["over_floor"] > 0
    assert "2x2, 8 MiB, gloo: " in capsys.readouterr().out


def test_versions_and_their_parts_differ_and_both_sides_make_the_same_ones():
    job = rank_ends.Job(sources=1, readers=1, mib=1, folder="", system="memcpy")
    source, target = (
        {name: torch.empty(shape) for name, (shape, _) in layout.local(0).items()}
        for layout in (job.source, job.target)
    )
    rank_ends.fill(job.source, 0, source, 1)
    rank_ends.fill(job.target, 0, target, 2)
    assert not any(torch.equal(source[name], target[name]) for name in source)
    rank_ends.fill(job.target, 0, target, 1)
    assert all(torch.equal(source[name], target[name]) for name in source)


def test_a_system_that_fails_in_its_process_is_told_in_words_and_leaves_nothing_behind():
    before = left_in_shared_memory()
    found = weight_plane_pair.measure(Job(system="unheard_of", case=CASE, updates=1, seconds=1.0))
    assert "KeyError: 'unheard_of'" in found
    assert left_in_shared_memory() == before


def test_a_failed_system_is_a_row_and_the_exit_status_and_the_others_go_on(
    tmp_path, monkeypatch, capsys
):
    def fake(job: Job) -> UpdateTimes | str:
        if job.system == "gloo":
            return "reader: RuntimeError: no route"
        return UpdateTimes([0.5], [0.25], [1.0], [2.0], [0.5], [0.1])

    monkeypatch.setattr(weight_plane, "measure", fake)
    path = tmp_path / "lines.jsonl"
    assert weight_plane.main([*SMALL, "--systems", "gloo", "ours_shm", "--json", str(path)]) == 1
    rows = lines(path)
    assert rows["gloo"]["skipped"] == "failed: reader: RuntimeError: no route"
    assert rows["ours_shm"]["waiting_gb_per_s"] == 2 * rows["ours_shm"]["gb_per_s"]
    assert "no route" in capsys.readouterr().out


def test_a_missing_ray_is_a_row_that_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(weight_plane_systems, "find_spec", lambda name: None)
    path = tmp_path / "lines.jsonl"
    assert weight_plane.main([*SMALL, "--systems", "ray", "--json", str(path)]) == 0
    assert "pip install" in lines(path)["ray"]["skipped"]
    assert "pip install" in capsys.readouterr().out


class Handing(Announcing):
    """Hands the state dict itself over."""

    def hand_over(self) -> None:
        torch.save(dict(self.seat.tensors), self.seat.memory / "state.pt")


class Forgetful(Told):
    """Loads all but the last tensor."""

    def load(self) -> None:
        state = torch.load(self.seat.memory / "state.pt", weights_only=True)
        last = self.seat.case.names[-1]
        self.put({**state, last: self.seat.tensors[last].clone()})


def test_bytes_that_did_not_arrive_are_found_at_that_update(tmp_path, monkeypatch):
    monkeypatch.setitem(weight_plane_systems.ENDS, "forgetful", (Handing, Forgetful))
    control, words = Pipe(), Pipe()
    job = Job(system="forgetful", case=CASE, updates=1, seconds=1.0)
    places = [{"words": end, "folder": tmp_path, "memory": tmp_path} for end in words]

    def reading() -> None:
        with pytest.raises(EOFError):
            weight_plane_pair.read(job, control[1], places[1])

    reader = threading.Thread(target=reading)
    reader.start()
    with pytest.raises(ValueError, match="other bytes than were published as version 1"):
        weight_plane_pair.train(job, control[0], places[0])
    control[0].close()
    reader.join(30)
    assert not reader.is_alive()


def test_systems_through_files_hand_over_every_tensor_once(tmp_path):
    mine, theirs = Pipe()
    sent, got = (dict.fromkeys(CASE.names), {name: torch.zeros(CASE.shape) for name in CASE.names})
    for number, name in enumerate(sent):
        sent[name] = torch.full(CASE.shape, number + 1.0)
    for system in ("safetensors", "torch_save"):
        trainer, reader = weight_plane_systems.ENDS[system]
        one = trainer(Seat(case=CASE, tensors=sent, words=mine, folder=tmp_path, memory=tmp_path))
        two = reader(Seat(case=CASE, tensors=got, words=theirs, folder=tmp_path, memory=tmp_path))
        assert not two.take()
        one.publish(1)
        assert two.take() and not two.take()
        assert all(torch.equal(got[name], sent[name]) for name in sent)
        for tensor in got.values():
            tensor.zero_()


def test_a_stall_is_what_the_longest_step_of_an_update_took_beyond_the_usual():
    ms = 1_000_000
    quiet = [(0, 0, ms), (ms, 0, ms), (2 * ms, 2 * ms, 3 * ms)]
    update = [(5 * ms, 0, ms), (6 * ms, ms, 7 * ms), (13 * ms, ms // 2, 2 * ms)]
    after = [(15 * ms, 80 * ms, 90 * ms)]
    assert stalls(quiet + update + after, called_ns=int(5.5 * ms), visible_ns=14 * ms) == (
        6.0,
        1.0,
        2.0,
    )


def test_ratios_are_taken_within_a_repeat():
    assert weight_plane.ratio({0: 1.0, 1: 4.0, 2: 9.0}, {0: 2.0, 1: 4.0}) == 0.75
    assert weight_plane.ratio({2: 9.0}, {0: 2.0}) is None
