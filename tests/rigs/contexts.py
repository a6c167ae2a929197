"""A Context by hand, from facts in one row: each goes into the record that has it."""

import dataclasses
from typing import Any

from dataflow.runtime import Context, DeviceShare, GraphFacts, RunSettings, WeightEnds

RECORDS = {"run": RunSettings, "graph": GraphFacts, "devices": DeviceShare, "weights": WeightEnds}


def make_context(**facts: Any) -> Context:
    """`make_context(node="trainer", steps=2)` is `Context(node="trainer",
    run=RunSettings(steps=2))`.
    """
    for name, kind in RECORDS.items():
        own = {each.name for each in dataclasses.fields(kind)} & facts.keys()
        facts[name] = kind(**{each: facts.pop(each) for each in own})
    return Context(**facts)
