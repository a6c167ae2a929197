"""Who hears that a worker listens elsewhere: those who send to it, and those who read the weights
of its trainers.
"""

import json

from dataflow.scheduler.events import Command, Refuse, Send
from dataflow.scheduler.table import WorkerRecord
from dataflow.system.files import to_json
from dataflow.worker.messages import Hello, Moved, WeightLine, Wire

from .test_scaling import Played, planned

EDGE = "prompts>generator:prompts"


HERE = WeightLine(host="a", at={"gloo": "tcp://10.0.0.1:7000"})


THERE = WeightLine(host="b", at={"gloo": "tcp://10.0.0.2:7000"})


def begun(*, replicas: int = 1) -> Played:
    played = Played(*planned(replicas={"generator": replicas}))
    played.table.workers["trainer-0"].lines = {"trainer": HERE}
    assert played.begin() == []
    return played


def hello(played: Played, name: str, line: WeightLine = HERE, **own: str) -> list[Command]:
    record = played.table.workers[name]
    lines = {"trainer": line} if name == "trainer-0" else {}
    addresses = dict(record.addresses) | own
    return played._said(
        name, lambda life: Hello(life=life, pid=1, addresses=addresses, lines=lines)
    )


def again(played: Played, name: str) -> None:
    """It dies, and is started again."""
    played.fell(name)
    played.starts(name)


def moves(commands: list[Command]) -> list[tuple[str, Moved]]:
    return [
        (each.to, each.message)
        for each in commands
        if isinstance(each, Send) and isinstance(each.message, Moved)
    ]


def wire(commands: list[Command]) -> Wire:
    (found,) = [
        each.message
        for each in commands
        if isinstance(each, Send) and isinstance(each.message, Wire)
    ]
    return found


def test_readers_hear_where_the_weights_are_of_a_trainer_that_was_started_elsewhere() -> None:
    played = begun(replicas=2)
    again(played, "trainer-0")
    told = moves(hello(played, "trainer-0", THERE))
    assert told == [(f"generator-{replica}", Moved(lines={"trainer": THERE})) for replica in (0, 1)]


def test_nobody_is_told_of_a_worker_that_listens_where_it_did() -> None:
    played = begun()
    for name in ("trainer-0", "generator-0"):
        again(played, name)
        assert moves(hello(played, name)) == []


def test_a_reader_that_was_away_while_the_trainer_moved_hears_it_when_it_is_wired() -> None:
    played = begun(replicas=2)
    again(played, "trainer-0")
    played.fell("generator-0")
    assert [to for to, _ in moves(hello(played, "trainer-0", THERE))] == ["generator-1"]
    played.starts("generator-0")
    assert wire(hello(played, "generator-0")).lines == {"trainer": THERE}


def test_senders_hear_where_a_receiver_is_and_all_addresses_that_they_may_know_it_by() -> None:
    played = begun()
    for number, address in enumerate(("at-b", "at-c", "at-generator-0"), 1):
        again(played, "generator-0")
        ((to, message),) = moves(hello(played, "generator-0", **{EDGE: address}))
        known = ["at-generator-0", "at-b", "at-c"][:number]
        assert (to, message.receivers) == ("prompts-0", {EDGE: address})
        assert message.before == {EDGE: sorted({*known} - {address})}


def test_a_successor_of_the_scheduler_says_again_who_moved_and_reads_it_from_what_was_left() -> (
    None
):
    from dataflow.scheduler.scaling import told_again

    played = begun()
    again(played, "generator-0")
    again(played, "trainer-0")
    hello(played, "generator-0", **{EDGE: "at-b"})
    hello(played, "trainer-0", THERE)
    left = json.loads(to_json(played.table.to_plain()))
    heir = Played(*planned())
    heir.table.take_up(left)
    told = [each for record in heir.table for each in told_again(heir.table, record)]
    assert moves(told) == [
        ("prompts-0", Moved(receivers={EDGE: "at-b"}, before={EDGE: ["at-generator-0"]})),
        ("generator-0", Moved(lines={"trainer": THERE})),
    ]


def test_a_worker_that_names_the_weight_line_of_another_is_refused() -> None:
    played = begun()
    again(played, "generator-0")
    record: WorkerRecord = played.table.workers["generator-0"]
    said = played._said(
        "generator-0",
        lambda life: Hello(life=life, pid=1, addresses=record.addresses, lines={"trainer": THERE}),
    )
    assert said == [Refuse("'generator-0'")]
    assert played.table.workers["trainer-0"].lines == {"trainer": HERE}
