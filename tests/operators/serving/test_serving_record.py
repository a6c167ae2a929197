"""Rows of calls: what they hold, the file that they go to, and the conversations that they make."""

import numpy as np
import pyarrow as pa
import pytest
from serving_rig import byte_tokenizer

from dataflow.errors import RecordError, RunError
from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.serving.calls import CallPrompt, Choice, ServedCall
from operators.serving.requests import parse
from operators.serving.rows import (
    COLUMNS,
    GroupIds,
    RolloutLog,
    conversations,
    read_rollouts,
    rows_of,
)
from operators.serving.sessions import Prompt
from operators.serving.text import Transcript, Vocabulary


def call(choices, number=0, prompt=(3, 4), parent=None, reused=0):
    """A call of one prompt with these choices, and that prompt."""
    part = CallPrompt(
        group_id=number,
        prompt=Prompt(prompt, "hi", parent=parent, reused=reused),
        seeds=list(range(len(choices))),
        choices=choices,
    )
    served = ServedCall(
        request=parse("completion", {"model": "tiny", "prompt": "hi", "temperature": 0.5}),
        session="s",
        request_id=f"r{number}",
        created_ms=1_700_000_000_000,
        parts=[part],
        ends=frozenset(),
        finished=lambda call, part: None,
    )
    return served, part


def ended(tokens, version=1, error=None):
    count = len(tokens)
    return Choice(
        0,
        Transcript(Vocabulary(byte_tokenizer())),
        tokens=RolloutTokens.drawn(tokens, np.full(count, -0.25), np.full(count, version)),
        finish_reason="error" if error else "stop",
        error=error,
    )


def batch(number=0, tokens=((5,), (6, 7)), **knobs):
    return rows_of(*call([ended(one) for one in tokens], number, **knobs))


def test_a_row_has_prompt_and_completion_end_to_end():
    rows = rows_of(*call([ended([5, 6]), ended([], error="gone")], 3)).to_pylist()
    assert rows[0]["tokens"] == [3, 4, 5, 6] and rows[1]["tokens"] == [3, 4]
    assert rows[0]["mask"] == [False, False, True, True]
    assert rows[0]["logprobs"] == [0.0, 0.0, -0.25, -0.25] and rows[0]["versions"] == [-1, -1, 1, 1]
    assert [row["rollout_id"] for row in rows] == [6, 7]
    assert (rows[1]["finish_reason"], rows[1]["error"]) == ("error", "gone")
    assert rows[0]["created"].timestamp() == 1_700_000_000


def test_numbers_never_name_two_rollouts_alike():
    numbers, seen, groups = GroupIds(), set(), []
    for size in (1, 8, 1, 3, 128, 2, 1, 1):
        number = numbers.take(size)
        ids = {number * size + position for position in range(size)}
        assert not ids & seen
        seen |= ids
        groups.append(number)
    assert groups == sorted(set(groups))


def test_what_was_appended_is_read_while_the_file_is_open_and_after(tmp_path):
    path = tmp_path / "deep" / "rollouts.arrow"
    file = RolloutLog(path)
    assert read_rollouts(path).num_rows == 0
    file.append(batch(0))
    assert read_rollouts(path).num_rows == 2
    file.append(batch(1))
    file.close()
    table = read_rollouts(path)
    assert table.schema.names == list(COLUMNS) and table.column("request_id").to_pylist() == [
        "r0",
        "r0",
        "r1",
        "r1",
    ]
    assert pa.ipc.open_stream(path).read_all().equals(table)


def test_a_file_that_is_opened_again_goes_on_with_free_numbers(tmp_path):
    path = tmp_path / "rollouts.arrow"
    first = RolloutLog(path)
    first.append(batch(first.numbers.take(2)))
    first.append(batch(first.numbers.take(2)))
    first.close()
    second = RolloutLog(path)
    number = second.numbers.take(2)
    second.append(batch(number))
    second.close()
    assert number == 2
    assert read_rollouts(path).column("rollout_id").to_pylist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("torn", [1, 7, 100, 1000])
def test_what_a_crash_tore_is_left_out_and_cut_off(tmp_path, torn):
    path = tmp_path / "rollouts.arrow"
    file = RolloutLog(path)
    file.append(batch(0))
    whole = path.stat().st_size
    file.append(batch(1))
    file.close()
    with path.open("r+b") as cut:
        cut.truncate(path.stat().st_size - torn)
    assert read_rollouts(path).column("group_id").to_pylist() == [0, 0]
    again = RolloutLog(path)
    assert path.stat().st_size == whole
    again.append(batch(again.numbers.take(2)))
    again.close()
    assert read_rollouts(path).column("group_id").to_pylist() == [0, 0, 1, 1]


def test_one_process_writes_a_file(tmp_path):
    file = RolloutLog(tmp_path / "rollouts.arrow")
    with pytest.raises(RunError, match="another process writing it"):
        RolloutLog(tmp_path / "rollouts.arrow")
    file.close()
    RolloutLog(tmp_path / "rollouts.arrow").close()


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not Arrow, but longer than a header of Arrow would be")
    with pytest.raises(RunError, match="no stream of rollouts"):
        RolloutLog(path)
    assert path.read_text().startswith("not Arrow")
    other = pa.schema([("a", pa.int64())])
    path.write_bytes(other.serialize())
    with pytest.raises(RunError, match="other columns"):
        RolloutLog(path)


def test_a_conversation_is_one_row_with_all_that_the_model_wrote():
    table = pa.Table.from_batches(
        [
            batch(0, ((5, 6),)),
            batch(1, ((9,),), prompt=(3, 4, 5, 6, 8), parent=0, reused=4),
            batch(2, ((2,),), prompt=(3, 4, 5, 6, 8, 9, 7), parent=1, reused=6),
        ]
    )
    (row,) = conversations(table).to_pylist()
    assert row["tokens"] == [3, 4, 5, 6, 8, 9, 7, 2]
    assert row["mask"] == [False, False, True, True, False, True, False, True]
    assert row["versions"] == [-1, -1, 1, 1, -1, 1, -1, 1]
    assert row["logprobs"] == [0, 0, -0.25, -0.25, 0, -0.25, 0, -0.25]
    assert row["rollout_id"] == 2


def test_what_two_conversations_share_is_chosen_once():
    table = pa.Table.from_batches(
        [
            batch(0, ((5, 6),)),
            batch(1, ((9,),), prompt=(3, 4, 5, 6, 8), parent=0, reused=4),
            batch(2, ((7,),), prompt=(3, 4, 5, 1), parent=0, reused=3),
        ]
    )
    first, second = conversations(table).to_pylist()
    assert sum(first["mask"]) == 3 and second["mask"] == [False, False, False, False, True]


def test_a_call_that_failed_does_not_continue_a_conversation():
    failed = rows_of(
        *call([ended([], error="too long")], 1, prompt=(3, 4, 5, 6, 8), parent=0, reused=4)
    )
    (row,) = conversations(pa.Table.from_batches([batch(0, ((5, 6),)), failed])).to_pylist()
    assert row["rollout_id"] == 0 and sum(row["mask"]) == 2


def test_a_parent_with_other_tokens_is_refused():
    table = pa.Table.from_batches(
        [batch(0, ((5, 6),)), batch(1, ((9,),), prompt=(3, 4, 5, 7, 8), parent=0, reused=4)]
    )
    with pytest.raises(RecordError, match="rollout 1 should begin with 4 tokens of rollout 0"):
        conversations(table)
