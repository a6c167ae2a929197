"""A program that runs a graph until a test ends it: python program.py KIND FOLDER [POLICY].

The environment's HOW is JSON: {"steps", "standby", "adopt_s", "limits",
"quiet", "track", "resume": whether to go on with the latest run}.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT.parent), str(ROOT)]

from dataflow import Graph, Model, run, scorer  # noqa: E402
from dataflow.display import say  # noqa: E402
from dataflow.limits import Limits  # noqa: E402
from dataflow.runtime import Context, Runtime  # noqa: E402
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer  # noqa: E402
from dataflow.trackers import children  # noqa: E402
from dataflow.worker import worker  # noqa: E402
from rigs.graphs import fake_graph, reward, tiny_graph  # noqa: E402
from rigs.machine import folders_made  # noqa: E402
from rigs.operators import built_by, deaf, slow  # noqa: E402

MODEL = Model("fake-policy")


def endless(folder: Path) -> Graph:
    """Fakes that never end, with a scorer in processes of its own."""

    @scorer(processes=2)
    def isolated(completion: str) -> float:
        return float(len(completion))

    source = slow(FakePrompts(size=None), seconds=0.02)
    trainer = FakeTrainer(model=MODEL, prompts_per_step=32)
    return fake_graph(
        source=source,
        generator=FakeGenerator(model=MODEL),
        scorers=(reward, isolated),
        trainer=trainer,
    )


def deaf_trainer(folder: Path) -> Graph:
    """A trainer that never ends the step under way."""
    source = slow(FakePrompts(size=None), seconds=0.02)
    trainer = deaf(FakeTrainer(model=MODEL, prompts_per_step=32), folder / "asked-to-drain")
    return fake_graph(source=source, generator=FakeGenerator(model=MODEL), trainer=trainer)


def late(folder: Path) -> Graph:
    """A generator that is built when the test is over."""
    generator = FakeGenerator(model=MODEL)

    def build(context: Context) -> Runtime:
        (folder / "building").touch()
        time.sleep(60)
        return FakeGenerator.build(generator, context)

    source = slow(FakePrompts(size=None), seconds=0.02)
    trainer = FakeTrainer(model=MODEL, prompts_per_step=32)
    return fake_graph(source=source, generator=built_by(generator, build), trainer=trainer)


def loading(folder: Path) -> Graph:
    """A forkserver that takes long to load what it is to load."""

    def preload(graph: object) -> None:
        (folder / "building").touch()
        time.sleep(60)

    worker.preload = preload
    return fake_graph()


def learning(folder: Path) -> Graph:
    """The real operators, for ever."""
    return tiny_graph(Path(sys.argv[3]))


def ranks(folder: Path) -> Graph:
    """The real operators on two ranks each, which wait for each other for most of the time: in
    collectives, since the second rank of the trainer is slow, and in exchanges of weights, since
    both send late.
    """
    preload = worker.preload

    def dawdle(graph: object) -> None:
        preload(graph)  # type: ignore[arg-type]
        import torch.distributed as dist

        from operators.training.learner.learner import Learner
        from transport.weights.sharded.transfer import GroupExchange

        micro, send = Learner.micro, GroupExchange.send

        def slow_micro(self: Learner, part: object) -> None:
            time.sleep(0.4 * dist.get_rank())
            micro(self, part)  # type: ignore[arg-type]

        def slow_send(self: GroupExchange, *arguments: object) -> object:
            time.sleep(0.4)
            return send(self, *arguments)  # type: ignore[arg-type]

        Learner.micro, GroupExchange.send = slow_micro, slow_send  # type: ignore[method-assign,assignment]

    worker.preload = dawdle
    return tiny_graph(Path(sys.argv[3]), max_tokens=8, generator_knobs={"tensor_parallel": 2})


KINDS: dict[str, Callable[[Path], Graph]] = {
    "endless": endless,
    "deaf_trainer": deaf_trainer,
    "late": late,
    "learning": learning,
    "loading": loading,
    "ranks": ranks,
}


def main() -> None:
    """Run on one core; the folders made for sockets stand in the file `made`."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind not in ("learning", "ranks"):
        worker.preload = lambda graph: None
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with (folder / "made").open("a", buffering=1) as made:
        tempfile.mkdtemp = folders_made(lambda path: made.write(f"{path}\n"))
        go(kind, folder)


def go(kind: str, folder: Path) -> None:
    """Run, and say what came of it."""
    how = json.loads(os.environ.get("HOW", "{}"))
    if how.get("track"):
        children.STEPS_BACK = False  # a busy machine gives such processes nothing
    more = {"ranks": {"trainer": 2}, "weights": "gloo"} if kind == "ranks" else {}
    latest = (folder / "runs" / "latest").resolve() if how.get("resume") else None
    result = run(
        KINDS[kind](folder),
        runs=folder / "runs",
        quiet=how.get("quiet", True),
        steps=how.get("steps"),
        resume=latest,
        standby=how.get("standby", False),
        track=how.get("track"),
        limits=Limits(adopt_s=how.get("adopt_s", 60.0), **how.get("limits", {})),
        **more,
    )
    say(f"ended after {result.steps} steps: {result.verdict.line}", sys.stdout)


if __name__ == "__main__":
    main()
