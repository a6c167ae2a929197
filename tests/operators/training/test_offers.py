"""What a trainer tells of the versions that its readers have taken."""

from types import SimpleNamespace
from typing import Any

from rigs.operators import make_context

from operators.training.offers import Offers
from transport.weights.protocol.roster import Sent


def offers(*ends: dict[str, Sent]) -> Offers:
    """Of a trainer with that many weight planes, by what each of them has sent."""
    opened: list[Any] = [SimpleNamespace(sent=sent) for sent in ends]
    refreshers = {
        f"every {line}": lambda tensors, end=end: end for line, end in enumerate(opened[1:], 1)
    }
    context = make_context(node="trainer", writer=lambda tensors: opened[0], refreshers=refreshers)
    learner: Any = SimpleNamespace(offered=lambda line: {}, writers={})
    return Offers(context, learner)


def test_a_line_tells_of_each_reader_and_has_the_figures_of_the_one_that_took_most() -> None:
    generator = Sent(7, ((10,),), 0.1, whole_bytes=40, committed_s=0.5, taken_s=0.3)
    judge = Sent(4, ((5,),), 0.1, whole_bytes=5, committed_s=0.9, taken_s=0.2)
    line = offers({"generator-0": generator}, {"judge-0": judge}).exchanged()
    versions = {name: sent["version"] for name, sent in line.pop("weights_sent").items()}
    assert versions == {"generator-0": 7, "judge-0": 4}
    assert line == {
        "weights_trainer_seconds": 0.9,
        "weights_reader_seconds": 0.3,
        "weights_moved_bytes": 10,
        "weights_full_bytes": 40,
    }
