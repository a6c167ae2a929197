"""The engine's thread: what it is asked, in which order, and what becomes of work that does not end
well.
"""

import threading

import numpy as np
import pytest
from rigs.machine import wait_until
from serving_rig import END, WAIT_S, ScriptedEngine

from dataflow.errors import DeadlineError, RunError
from operators.engine.interface import ABORTED, STOPPED, TOO_LONG
from operators.engine.sampler import Sampling
from operators.serving.serve import EngineThread, Overloaded
from operators.serving.work import Work


class Heard:
    """What a work's rollouts were told."""

    def __init__(self, prompt=(5,), count=1, limit=50, streams=False, **knobs):
        self.news, self.over, self.left = [], threading.Event(), count
        self.work = Work(
            prompt=np.array(prompt, np.int64),
            limit=limit,
            seeds=list(range(count)),
            sampling=Sampling(),
            stop=None,
            tell=self.hear,
            streams=streams,
            **knobs,
        )

    def hear(self, news):
        self.news.append(news)
        self.left -= news.reason is not None
        if not self.left:
            self.over.set()

    def wait(self):
        assert self.over.wait(WAIT_S)
        return {news.position: news for news in self.news if news.reason is not None}


@pytest.fixture
def thread_of():
    made = []

    def make(engine, **knobs):
        thread = EngineThread(engine, idle_s=0.05, **knobs)
        made.append(thread)
        thread.start()
        return thread

    yield make
    for thread in made:
        if thread.engine.permits is not None:
            thread.engine.permits.release(1000)
        thread.close(WAIT_S)


def count_up(prompt, seed):
    return [10 + seed, 11, 12, END]


def test_each_rollout_ends_once_and_with_all_its_tokens(thread_of):
    thread = thread_of(ScriptedEngine(count_up, slots=2))
    all_heard = [Heard(count=3), Heard(prompt=(6, 7), limit=4), Heard()]
    thread.submit([heard.work for heard in all_heard])
    first, second, third = (heard.wait() for heard in all_heard)
    assert [first[i].tokens.ids.tolist() for i in range(3)] == [
        [10 + i, 11, 12, END] for i in range(3)
    ]
    assert (second[0].tokens.ids.tolist(), second[0].reason) == ([10, 11], TOO_LONG)
    assert (third[0].reason, third[0].error) == (STOPPED, None)
    assert [len(heard.news) for heard in all_heard] == [3, 1, 1]
    assert thread.waiting == 0


def test_prompts_start_in_the_order_of_their_arrival(thread_of):
    engine = ScriptedEngine(count_up, slots=2)
    thread = thread_of(engine)
    all_heard = [Heard(prompt=(20 + i,), count=2) for i in range(6)]
    thread.submit([heard.work for heard in all_heard])
    for heard in all_heard:
        heard.wait()
    assert [start.prompt[0] for start in engine.started] == [20, 21, 22, 23, 24, 25]


def test_streams_hear_of_tokens_before_the_end(thread_of):
    permits = threading.Semaphore(2)
    thread = thread_of(ScriptedEngine(count_up, permits=permits), stream_s=0.0)
    heard, quiet = Heard(streams=True), Heard()
    thread.submit([heard.work, quiet.work])
    wait_until(lambda: len(heard.news) == 2, what="two tokens")
    assert [news.tokens.ids.tolist() for news in heard.news] == [[10], [10, 11]]
    assert quiet.news == []
    permits.release(2)
    assert heard.wait()[0].tokens.ids.tolist() == [10, 11, 12, END]


def test_a_full_queue_refuses_all_prompts_of_a_call(thread_of):
    permits = threading.Semaphore(0)
    engine = ScriptedEngine(count_up, slots=1, permits=permits)
    thread = thread_of(engine, most_waiting=2)
    running, waiting = Heard(), Heard()
    thread.submit([running.work])
    wait_until(lambda: thread.waiting == 0, what="the first to start")
    thread.submit([waiting.work])
    with pytest.raises(Overloaded, match="2 prompts cannot be queued; 1 of at most 2 are waiting"):
        thread.submit([Heard().work, Heard().work])
    permits.release(100)
    assert running.wait() and waiting.wait()


def test_a_cancelled_work_keeps_what_it_drew_and_what_never_began_is_empty(thread_of):
    permits = threading.Semaphore(2)
    engine = ScriptedEngine(count_up, slots=1, permits=permits)
    thread = thread_of(engine)
    heard, other = Heard(count=2), Heard()
    thread.submit([heard.work, other.work])
    wait_until(lambda: engine.stepped == 2, what="two steps")
    thread.cancel(heard.work, "nobody wants it")
    permits.release(100)
    found = heard.wait()
    assert found[0].tokens.ids.tolist()[:2] == [10, 11] and found[1].tokens.ids.tolist() == []
    assert {news.reason for news in found.values()} == {ABORTED}
    assert {news.error for news in found.values()} == {"nobody wants it"}
    assert other.wait()[0].reason == STOPPED
    assert thread.waiting == 0


def test_weights_change_between_two_steps_and_each_token_says_its_version(thread_of):
    permits = threading.Semaphore(2)
    engine = ScriptedEngine(count_up, permits=permits)
    thread = thread_of(engine)
    heard = Heard()
    thread.submit([heard.work])
    wait_until(lambda: engine.stepped == 2, what="two steps")
    applied = []

    def apply(tensors):
        applied.append((threading.current_thread().name, list(tensors)))
        tensors["weight"] += 1

    updating = threading.Thread(target=thread.update, args=(7, apply))
    updating.start()
    wait_until(lambda: not thread._inbox.empty() or applied, what="the update to be queued")
    permits.release(100)
    updating.join(WAIT_S)
    versions = heard.wait()[0].tokens.versions.tolist()
    assert versions == sorted(versions) and set(versions) == {0, 7} and versions[:2] == [0, 0]
    assert applied == [("engine", ["weight"])]


def test_an_update_of_an_idle_engine_needs_no_call(thread_of):
    engine = ScriptedEngine(count_up)
    thread_of(engine).update(3, lambda tensors: None, timeout_s=WAIT_S)
    assert engine.version == 3


def test_an_update_that_fails_is_raised_where_it_was_asked_for(thread_of):
    engine = ScriptedEngine(count_up)
    thread = thread_of(engine)

    def apply(tensors):
        raise TimeoutError("the weights did not come")

    with pytest.raises(TimeoutError, match="the weights did not come"):
        thread.update(3, apply, timeout_s=WAIT_S)
    assert engine.version == 0
    heard = Heard()
    thread.submit([heard.work])
    assert heard.wait()[0].reason == STOPPED


def test_an_update_that_comes_too_late_is_not_made(thread_of):
    permits = threading.Semaphore(0)
    engine = ScriptedEngine(count_up, permits=permits)
    thread = thread_of(engine)
    heard = Heard()
    thread.submit([heard.work])
    wait_until(lambda: thread.waiting == 0, what="the step to begin")
    with pytest.raises(DeadlineError, match="version 3 waited for the engine's thread"):
        thread.update(3, lambda tensors: None, timeout_s=0.01)
    permits.release(100)
    assert set(heard.wait()[0].tokens.versions.tolist()) == {0}
    assert engine.version == 0


def test_an_engine_that_fails_ends_its_rollouts_and_goes_on(thread_of):
    engine = ScriptedEngine(count_up)
    engine.broken = RuntimeError("out of memory")
    thread = thread_of(engine)
    heard = Heard(count=2)
    thread.submit([heard.work])
    found = heard.wait()
    assert {news.reason for news in found.values()} == {ABORTED}
    assert "out of memory" in found[0].error
    assert "out of memory" in thread.failure
    later = Heard()
    thread.submit([later.work])
    assert later.wait()[0].reason == STOPPED
    assert thread.failure is None and thread.waiting == 0


def test_a_caller_that_fails_to_hear_harms_nobody_else(thread_of):
    thread = thread_of(ScriptedEngine(count_up))
    deaf, heard = Heard(), Heard()
    deaf.work.tell = lambda news: 1 / 0
    thread.submit([deaf.work, heard.work])
    assert heard.wait()[0].reason == STOPPED


def test_closing_ends_what_is_under_way_and_refuses_what_comes(thread_of):
    permits = threading.Semaphore(1)
    engine = ScriptedEngine(count_up, slots=1, permits=permits)
    thread = thread_of(engine)
    running, waiting = Heard(), Heard()
    thread.submit([running.work, waiting.work])
    wait_until(lambda: engine.stepped == 1, what="a step")
    closing = threading.Thread(target=thread.close, args=(WAIT_S,))
    closing.start()
    wait_until(lambda: thread._closing, what="the thread to be closing")
    permits.release(1)
    closing.join(WAIT_S)
    assert running.wait()[0].tokens.ids.tolist()[:1] == [10]
    assert "shut down" in running.wait()[0].error and "shut down" in waiting.wait()[0].error
    with pytest.raises(RunError, match="shutting down"):
        thread.submit([Heard().work])
    with pytest.raises((RunError, DeadlineError)):
        thread.update(1, lambda tensors: None, timeout_s=0.05)


def test_a_thread_that_does_not_end_is_named(thread_of):
    permits = threading.Semaphore(0)
    engine = ScriptedEngine(count_up, permits=permits)
    thread = thread_of(engine)
    thread.submit([Heard().work])
    wait_until(lambda: thread.waiting == 0, what="the step to begin")
    with pytest.raises(DeadlineError, match="found it alive after 0.01 s"):
        thread.close(0.01)
    permits.release(100)
    thread.close(WAIT_S)
