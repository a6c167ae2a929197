"""What a new scheduler says to workers that have not found its socket yet: it is kept until each has spoken."""

from dataflow.scheduler.deferred_sends import Unheard


def test_words_wait_for_the_first_word_of_their_worker_and_leave_in_order() -> None:
    unheard, sent = Unheard(["a-0", "b-0"]), list[str]()
    for text in ("first", "second"):
        unheard.reach("a-0", lambda text=text: sent.append(text))
    assert sent == []
    unheard.spoke("b-0")
    assert sent == []
    unheard.spoke("a-0")
    assert sent == ["first", "second"]
    unheard.reach("a-0", lambda: sent.append("third"))
    assert sent == ["first", "second", "third"]


def test_whoever_was_not_taken_over_hears_at_once() -> None:
    unheard, sent = Unheard(), list[str]()
    unheard.reach("a-0", lambda: sent.append("word"))
    assert sent == ["word"]


def test_the_next_attempt_hears_nothing_that_was_meant_for_the_one_before() -> None:
    unheard, sent = Unheard(["a-0"]), list[str]()
    unheard.reach("a-0", lambda: sent.append("old"))
    unheard.forget("a-0")
    unheard.reach("a-0", lambda: sent.append("new"))
    unheard.spoke("a-0")
    assert sent == ["new"]
