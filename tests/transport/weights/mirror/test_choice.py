"""Who is the mirror of a host, and whom the others follow: a pure choice, played by readers that
come, go and stop.
"""

import random
from dataclasses import dataclass

import pytest

from transport.weights.mirror.choice import APART_S, MOST_ORDER, SILENT_S, MirrorView, choose

LATE_S = SILENT_S + APART_S * MOST_ORDER


def seen(**facts: object) -> MirrorView:
    known = {"own": "me", "follows": "", "noted": "", "leads": False, "quiet_s": 0.0, "order": 0}
    return MirrorView(**(known | facts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "does"),
    [
        ({}, "lead"),
        ({"order": 1}, "stay"),
        ({"order": 1, "quiet_s": APART_S}, "lead"),
        ({"order": 1, "noted": "it"}, "follow"),
        ({"order": 99, "quiet_s": APART_S * MOST_ORDER}, "lead"),
        ({"noted": "me"}, "lead"),
        ({"noted": "it", "follows": "it", "quiet_s": SILENT_S - 0.1}, "stay"),
        ({"noted": "it", "follows": "it", "quiet_s": SILENT_S}, "lead"),
        ({"noted": "it", "follows": "it", "quiet_s": SILENT_S, "order": 2}, "stay"),
        ({"noted": "new", "follows": "it", "quiet_s": 99.0}, "follow"),
        ({"noted": "me", "follows": "me", "leads": True, "quiet_s": 99.0}, "stay"),
        ({"noted": "", "follows": "me", "leads": True}, "stay"),
        ({"noted": "it", "follows": "me", "leads": True}, "follow"),
    ],
)
def test_a_reader_does_what_follows_from_what_it_sees(facts: dict[str, object], does: str) -> None:
    assert choose(seen(**facts)) == does


@dataclass
class Reader:
    name: str
    order: int
    follows: str = ""
    leads: bool = False
    heard: float = 0.0
    runs: bool = True
    there: bool = True


@pytest.mark.parametrize("seed", range(40))
def test_whoever_is_stopped_or_killed_all_others_have_one_mirror_that_runs_soon_after(
    seed: int,
) -> None:
    """However they are stopped, go on, are killed and started again: once that has an end, one of
    those that run is the mirror, the note names it, and all that run follow it.
    """
    rng = random.Random(seed)
    readers = [Reader(f"r{number}", number) for number in range(rng.randint(1, 5))]
    note, now = "", 0.0
    trouble_s = rng.uniform(0.0, 30.0)
    while now < trouble_s + 2 * LATE_S + 1.0:
        now += 0.1
        if now < trouble_s:
            for each in readers:
                if rng.random() < 0.01:
                    each.runs = not each.runs
                if rng.random() < 0.005:
                    each.follows, each.leads, each.heard, each.there = (
                        "",
                        False,
                        now,
                        not each.there,
                    )
        elif now < trouble_s + 0.2:
            for each in readers[:1]:
                each.runs = each.there = True
        for each in rng.sample(readers, len(readers)):
            if not (each.runs and each.there):
                continue
            lead = next((other for other in readers if other.name == each.follows), None)
            if lead and lead.leads and lead.runs and lead.there:
                each.heard = now
            what = choose(
                MirrorView(
                    own=each.name,
                    follows=each.follows,
                    noted=note,
                    leads=each.leads,
                    quiet_s=now - each.heard,
                    order=each.order,
                )
            )
            if what == "lead":
                each.leads, each.follows, each.heard, note = True, each.name, now, each.name
            elif what == "follow":
                each.leads, each.follows, each.heard = False, note, now
    able = [each for each in readers if each.runs and each.there]
    assert [each.name for each in able if each.leads] == [note]
    assert {each.follows for each in able} == {note}
