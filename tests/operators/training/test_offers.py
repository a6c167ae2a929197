"""What a trainer tells of the versions that its readers have taken, those too that one hands to
others.
"""

from types import SimpleNamespace
from typing import Any

from operators.training.offers import Offers
from transport.weights.protocol.roster import HandedOn, Sent


def offers(*ends: dict[str, Sent]) -> Offers:
    """Of a trainer with that many weight planes, by what each of them has sent."""
    opened: list[Any] = [SimpleNamespace(sent=sent) for sent in ends]
    refreshers = {
        f"every {line}": lambda tensors, end=end: end for line, end in enumerate(opened[1:], 1)
    }
    context: Any = SimpleNamespace(writer=lambda tensors: opened[0], refreshers=refreshers)
    learner: Any = SimpleNamespace(offered=lambda line: {}, writers={})
    return Offers(context, learner)


def test_seconds_of_who_is_handed_a_version_are_told_and_the_longest_are_the_line_s() -> None:
    behind = {"generator-1": HandedOn(6, 0.9, 0.2), "values-0": HandedOn(7, 0.4, 0.3)}
    mirror = Sent(7, ((10,),), 0.1, whole_bytes=40, committed_s=0.5, taken_s=0.1, behind=behind)
    told = offers(
        {"generator-0": mirror}, {"judge-0": Sent(4, ((5,),), 0.1, whole_bytes=5)}
    ).exchanged()
    sent = told.pop("weights_sent")
    assert sent["generator-0"]["handed_on"] == {
        "generator-1": {"version": 6, "committed_seconds": 0.9, "taken_seconds": 0.2},
        "values-0": {"version": 7, "committed_seconds": 0.4, "taken_seconds": 0.3},
    }
    assert "handed_on" not in sent["judge-0"]
    assert told == {
        "weights_trainer_seconds": 0.9,
        "weights_reader_seconds": 0.3,
        "weights_moved_bytes": 10,
        "weights_full_bytes": 40,
    }
