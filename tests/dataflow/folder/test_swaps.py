"""What the ledger says of operators that were swapped in."""

from pathlib import Path

from dataflow.folder.ledger import Ledger
from dataflow.folder.live_changes import (
    Swap,
    latest_swaps,
    read_swaps,
    record_swaps,
    recorded_swaps,
)
from dataflow.folder.run_folder import RunFolder


def made(number: int, node: str = "reward", **more: str) -> Swap:
    return Swap(
        number=number,
        node=node,
        reference="rewards:strict",
        source="text\n",
        digest="ab" * 32,
        **more,
    )


def test_swaps_stand_in_the_ledger_in_their_order_whoever_puts_them_down_and_however_often(
    tmp_path: Path,
) -> None:
    folder = RunFolder.create(tmp_path, "test")
    assert read_swaps(folder) == (), "there is no ledger yet"
    with Ledger.create(folder.ledger, {}) as ledger:
        ledger.set_facts({"config": {"seed": 1}})
        record_swaps(ledger, ["reward"], [made(10)])
        record_swaps(ledger, ["varied"], [made(9, "varied")])
        record_swaps(ledger, ["reward", "varied"], [made(9, "varied"), made(10)])
        record_swaps(ledger, ["other"], [])
        record_swaps(ledger, ["reward"], [made(11)])
        assert recorded_swaps(ledger.facts()) == (made(9, "varied"), made(10), made(11))
    assert [swap.number for swap in read_swaps(folder)] == [9, 10, 11]
    assert latest_swaps(read_swaps(folder)) == [made(9, "varied"), made(11)]


def test_a_swap_that_was_taken_back_counts_no_more_and_its_number_may_be_used_again(
    tmp_path: Path,
) -> None:
    with Ledger.create(tmp_path / "ledger.db", {}) as ledger:
        record_swaps(ledger, ["reward"], [made(1)])
        record_swaps(ledger, ["reward"], [made(2)])
        record_swaps(ledger, ["reward"], [made(1)])
        assert recorded_swaps(ledger.facts()) == (made(1),)
        record_swaps(ledger, ["reward"], [made(2, by="anna@here")])
        assert recorded_swaps(ledger.facts()) == (made(1), made(2, by="anna@here"))
        record_swaps(ledger, ["reward"], [])
        assert recorded_swaps(ledger.facts()) == ()


def test_what_was_put_down_once_is_not_put_down_in_another_way(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.db", {}) as ledger:
        record_swaps(ledger, ["reward"], [made(1, by="anna@here")])
        record_swaps(ledger, ["reward"], [made(1, by="somebody@else")])
        assert recorded_swaps(ledger.facts())[0].by == "anna@here"


def test_people_are_told_what_of_which_text_from_when_on_and_by_whom() -> None:
    said = str(made(1, by="anna@here"))
    assert said.startswith("reward = rewards:strict (sha256 abababababab) after step 0, ")
    assert said.endswith(", by anna@here")
