"""What the ledger says of operators that were swapped in."""

from pathlib import Path

from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.folder.swaps import Swap, latest, read_swaps, record, recorded


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
        record(ledger, ["reward"], [made(10)])
        record(ledger, ["varied"], [made(9, "varied")])
        record(ledger, ["reward", "varied"], [made(9, "varied"), made(10)])
        record(ledger, ["other"], [])
        record(ledger, ["reward"], [made(11)])
        assert recorded(ledger.facts()) == (made(9, "varied"), made(10), made(11))
    assert [swap.number for swap in read_swaps(folder)] == [9, 10, 11]
    assert latest(read_swaps(folder)) == [made(9, "varied"), made(11)]


def test_a_swap_that_was_taken_back_counts_no_more_and_its_number_may_be_used_again(
    tmp_path: Path,
) -> None:
    with Ledger.create(tmp_path / "ledger.db", {}) as ledger:
        record(ledger, ["reward"], [made(1)])
        record(ledger, ["reward"], [made(2)])
        record(ledger, ["reward"], [made(1)])
        assert recorded(ledger.facts()) == (made(1),)
        record(ledger, ["reward"], [made(2, by="anna@here")])
        assert recorded(ledger.facts()) == (made(1), made(2, by="anna@here"))
        record(ledger, ["reward"], [])
        assert recorded(ledger.facts()) == ()


def test_what_was_put_down_once_is_not_put_down_in_another_way(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.db", {}) as ledger:
        record(ledger, ["reward"], [made(1, by="anna@here")])
        record(ledger, ["reward"], [made(1, by="somebody@else")])
        assert recorded(ledger.facts())[0].by == "anna@here"


def test_people_are_told_what_of_which_text_from_when_on_and_by_whom() -> None:
    said = str(made(1, by="anna@here"))
    assert said.startswith("reward = rewards:strict (sha256 abababababab) after step 0, ")
    assert said.endswith(", by anna@here")
