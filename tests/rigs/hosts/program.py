"""A program that runs a graph over hosts, whose agents a test starts: python program.py JSON.

JSON: {"graph": a name of `GRAPHS`, "knobs": of it, "hosts": how many, 1: this one alone, without an
agent, "listen": address of this one, "folder": shared, "limits": of `Limits`, "run": what else
`run` is to get}.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT.parent), str(ROOT)]

from dataflow import DataflowError, Graph, run  # noqa: E402
from dataflow.history.launch import this_launch  # noqa: E402
from dataflow.limits import Limits  # noqa: E402
from dataflow.testing import FakePrompts  # noqa: E402
from dataflow.worker import worker  # noqa: E402
from rigs.graphs import fake_graph, tiny_graph  # noqa: E402
from rigs.hosts.by_hand import ByHand  # noqa: E402
from rigs.operators import slow  # noqa: E402


def fakes(pause_s: float = 0.0) -> Graph:
    """Without torch."""
    worker.preload = lambda graph: None
    return fake_graph(source=slow(FakePrompts(size=None), seconds=pause_s))


def tiny(policy: str, **knobs: Any) -> Graph:
    """The real operators around a policy with random weights."""
    return tiny_graph(Path(policy), **knobs)


def sorting(**knobs: Any) -> Graph:
    """The demo."""
    from graphs.sorting import build

    return build(**knobs)


GRAPHS: Mapping[str, Callable[..., Graph]] = {"fakes": fakes, "tiny": tiny, "sorting": sorting}


def main() -> None:
    given = json.loads(sys.argv[1])
    on = ByHand(given["hosts"], given["listen"], given["folder"]) if given["hosts"] > 1 else None
    try:
        result = run(
            GRAPHS[given["graph"]](**given["knobs"]),
            on=on,
            runs=Path(given["folder"], "runs"),
            limits=Limits(**given["limits"]),
            launch=this_launch(),
            **given["run"],
        )
    except DataflowError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"ended after {result.steps} steps: {result.verdict.line}")


if __name__ == "__main__":
    main()
