"""Laws of the weight-plane bench: same bytes for all, checked after every update; one failure is
one row.
"""

import json
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from bench.weight_plane import __main__ as weight_plane
from bench.weight_plane import systems as weight_plane_systems
from bench.weight_plane.cases import Case, Job, Seat, UpdateTimes
from bench.weight_plane.simulation import gather_and_broadcast
from transport.weights.costs.explain import Interconnect

SMALL = ["--mib", "1", "--tensors", "3", "--repeats", "1", "--updates", "2"]
CASE = Case(1, 3)
GB = 10**9


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


def test_gathering_whole_tensors_moves_them_through_one_link():
    links = Interconnect(
        gpus_per_node=2, within_bytes_per_s=100 * GB, between_bytes_per_s=10 * GB, message_s=0.0
    )
    assert gather_and_broadcast(100 * GB, 4, 4, links, root_links=2).broadcast_s == pytest.approx(
        5.0
    )
    made = gather_and_broadcast(100 * GB, 4, 4, links)
    assert made.gather_s == pytest.approx(2.5)  # half of it, over the two links of a node
    assert made.broadcast_s == pytest.approx(10.0)
    assert made.seconds == pytest.approx(12.5)
    assert (made.source_bytes, made.destination_bytes) == (75 * GB, 100 * GB)
    alone = gather_and_broadcast(
        100 * GB, 1, 1, Interconnect(destination_first=1, within_bytes_per_s=100 * GB)
    )
    assert (alone.gather_s, alone.broadcast_s) == (0.0, pytest.approx(1.0))
