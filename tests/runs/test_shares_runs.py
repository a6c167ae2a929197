"""How nodes of real runs spend their time: each state for itself, all of it together, and which
node bounds the run.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from episode_rig import TURNS, episode_graph
from rigs.graphs import fake_graph, reward, tiny_graph, words
from rigs.operators import paced, withheld

from dataflow import Graph, Model, Result, inline, join, run, scorer
from dataflow.errors import RunError
from dataflow.folder.run_folder import RunFolder
from dataflow.live.looks import Looks
from dataflow.testing import FakeGenerator, FakeTrainer
from dataflow.worker.state_clock import STATES
from operators import Generator, Logprobs, Prompts, Trainer, Values, episode
from operators.credit import token_gae, token_rewards
from operators.losses import aipo, value_loss

pytestmark = [pytest.mark.usefixtures("machine"), pytest.mark.timeout(600), pytest.mark.slow]


MODEL = Model("fake-policy")


def gone(where: RunFolder, patience_s: float) -> Mapping[str, Any]:
    raise RunError("takes no commands")


def spent(result: Result) -> tuple[dict[str, dict[str, float]], float]:
    """By node its seconds between two lines of activity.jsonl, and how many seconds passed
    meanwhile, by the run's own clock: the first lies behind the start, the last before the end.
    """
    lines = RunFolder.open(result.folder).read_activity()
    last = lines[-1]
    first = next(
        line for line in lines if line["seconds"] and line["nodes"].keys() == last["nodes"].keys()
    )
    nodes = {
        name: {key: said[key] - first["nodes"][name][key] for key in (*STATES, "measured")}
        for name, said in last["nodes"].items()
    }
    return nodes, last["seconds"] - first["seconds"]


def shares(result: Result) -> dict[str, dict[str, float]]:
    nodes, _ = spent(result)
    return {
        name: {state: said[state] / said["measured"] for state in STATES}
        for name, said in nodes.items()
    }


@scorer(isolate=False)
def quick(completion: str) -> float:
    """In its worker."""
    return float(len(completion))


@scorer(isolate=False, per="group")
def ranked(quick: Any) -> Any:
    """In the same worker."""
    return quick - quick.mean()


@scorer(processes=2)
def judged(completion: str) -> float:
    """In a pool."""
    time.sleep(0.002)
    return float(len(completion))


@episode(max_turns=TURNS)
async def talk(chat: Any, answer: str) -> float:
    """As many turns as the prompt says."""
    for _ in range(int(answer)):
        chat.hear(await chat.say(max_tokens=4))
    return float(answer)


def actor_and_critic(policy: Path) -> Graph:
    """Each trained on the rows of one generator, which a reference and the critic look at side by
    side.
    """
    g, model, expected = (
        Graph("two"),
        Model(str(policy)),
        Model(str(policy), head="value", name="critic"),
    )
    generator, values = (
        Generator(model, group_size=4, max_tokens=12, segment_tokens=4, slots=32),
        Values(expected),
    )
    stream = reward(generator(g.source(Prompts(words(), columns=("answer",)))))
    stream = token_gae(
        token_rewards(join(Logprobs(model.frozen())(stream), values(stream)), beta=0.01), lam=0.95
    )
    trainer = Trainer(
        model, loss=partial(aipo, rho=4.0), prompts_per_step=4, lr=1e-3, normalize="rollouts"
    )
    critic = Trainer(expected, name="critic", loss=value_loss, prompts_per_step=4, lr=1e-3)
    trainer(stream)
    critic(stream)
    g.feedback(trainer.weights, generator, max_staleness=1)
    g.feedback(critic.weights, values, max_staleness=1)
    return g


SHAPES: dict[str, Callable[[Path, Path], Result]] = {
    "light operators in one worker, and a pool": lambda policy, runs: run(
        fake_graph(
            scorers=(judged, quick, ranked), trainer=paced(FakeTrainer(model=MODEL), 0.2), count=400
        ),
        runs=runs,
        quiet=True,
    ),
    "replicas": lambda policy, runs: run(
        fake_graph(generator=paced(FakeGenerator(model=MODEL), 0.05), count=400),
        replicas={"generator": 3},
        runs=runs,
        quiet=True,
    ),
    "one process": lambda policy, runs: run(
        fake_graph(
            scorers=(judged, quick, ranked), trainer=paced(FakeTrainer(model=MODEL), 0.1), count=400
        ),
        on=inline(),
        runs=runs,
        quiet=True,
    ),
    "synchronous, with evaluation": lambda policy, runs: run(
        tiny_graph(policy, max_staleness=0, eval_every=30), steps=300, runs=runs, quiet=True
    ),
    "asynchronous, with ranks": lambda policy, runs: run(
        tiny_graph(policy, max_staleness=2), steps=240, ranks={"trainer": 2}, runs=runs, quiet=True
    ),
    "devices in turns": lambda policy, runs: run(
        tiny_graph(policy, max_staleness=0), steps=120, gpus="shared", runs=runs, quiet=True
    ),
    "two trainers, forward operators, a join": lambda policy, runs: run(
        actor_and_critic(policy), steps=240, runs=runs, quiet=True
    ),
    "episodes": lambda policy, runs: run(
        episode_graph(policy, talk, reward, eval_every=20), steps=180, runs=runs, quiet=True
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_states_of_every_node_add_up_to_the_time_of_the_run(
    shape: str, policy: Path, machine: None, tmp_path: Path
) -> None:
    result = SHAPES[shape](policy, tmp_path)
    assert result.verdict.clean, result.verdict.line
    nodes, passed = spent(result)
    replicas = RunFolder.open(result.folder).read_activity()[-1]["nodes"]
    assert passed > 3.0, "too short to tell"
    for name, said in nodes.items():
        assert sum(said[state] for state in STATES) == pytest.approx(said["measured"], rel=0.001), (
            name,
            said,
        )
        whole = passed * replicas[name]["replicas"]
        assert said["measured"] == pytest.approx(whole, rel=0.03, abs=0.25), (name, said, whole)


def test_operators_that_spin_and_sleep_are_busy_and_one_without_room_ahead_is_blocked(
    light: None, tmp_path: Path
) -> None:
    """A step takes 80 ms of a processor, the groups for it 24 ms of sleep, and 32 groups may be
    under way.
    """
    generator = paced(FakeGenerator(model=MODEL), 0.003)
    trainer = paced(FakeTrainer(model=MODEL), 0.08, spins=True)
    graph = fake_graph(
        generator=generator, trainer=trainer, scorers=(quick,), count=None, max_staleness=3
    )
    found = shares(run(graph, steps=60, runs=tmp_path, quiet=True))
    assert found["trainer"]["busy"] > 0.8
    assert 0.05 < found["generator"]["busy"] < 0.7 and found["generator"]["waiting"] > 0.3
    assert found["prompts"]["blocked"] > 0.8
    assert max(of["starved"] for of in found.values()) == 0


def test_one_whose_weights_are_withheld_is_starved_and_who_waits_for_it_waits(
    light: None, tmp_path: Path
) -> None:
    """It has rows, and may not begin any before 400 ms; then it sleeps 10 ms for each group that it
    takes.
    """
    generator = withheld(paced(FakeGenerator(model=MODEL), 0.01), 0.4)
    graph = fake_graph(generator=generator, scorers=(quick,), count=None, max_staleness=3)
    found = shares(run(graph, steps=4, runs=tmp_path, quiet=True))
    assert (
        found["generator"]["starved"] > 0.6
        and found["generator"]["starved"] + found["generator"]["busy"] > 0.9
    )
    assert found["trainer"]["waiting"] > 0.8 and found["trainer"]["starved"] == 0


# Which node bounds a run


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds that a step of eight prompts takes each node."""

    generator: float = 0.06
    judged: float = 0.06
    quick: float = 0.03
    ranked: float = 0.03
    trainer: float = 0.06
    replicas: int = 1
    """Of the generator."""

    def run(self, runs: Path) -> Result:
        """Twenty steps of fakes that sleep."""
        pace = self

        @scorer(processes=1)
        def judged(completion: str) -> float:
            time.sleep(pace.judged / 32)
            return 1.0

        @scorer(isolate=False)
        def quick(completion: str) -> float:
            time.sleep(pace.quick / 32)
            return 1.0

        @scorer(isolate=False, per="group")
        def ranked(quick: Any) -> Any:
            time.sleep(pace.ranked / 8)
            return quick

        graph = fake_graph(
            generator=paced(FakeGenerator(model=MODEL), pace.generator / 8),
            count=None,
            max_staleness=3,
            scorers=(judged, quick, ranked),
            trainer=paced(FakeTrainer(model=MODEL), pace.trainer),
        )
        return run(graph, steps=20, replicas={"generator": pace.replicas}, runs=runs, quiet=True)


NODES = ("generator", "judged", "quick", "ranked", "trainer")


BOUND = {
    "trainer": Pace(trainer=0.24),
    "generator": Pace(generator=0.24),
    "judged": Pace(judged=0.24),
    "ranked": Pace(generator=0.15, quick=0.09, ranked=0.15),
    "trainer, not one of two generators": Pace(generator=0.3, replicas=2, trainer=0.25),
}


@pytest.mark.parametrize("bound", BOUND)
def test_the_node_that_is_named_is_the_one_that_made_twice_as_fast_gains_most(
    bound: str, light: None, tmp_path: Path
) -> None:
    pace = BOUND[bound]
    result = pace.run(tmp_path / "as it is")
    named = Looks(RunFolder.open(result.folder), gone).look()["bottleneck"]
    assert named == bound.partition(",")[0], shares(result)
    faster = {
        node: replace(pace, **{node: getattr(pace, node) / 2}).run(tmp_path / node).seconds
        for node in NODES
    }
    assert min(faster, key=lambda node: faster[node]) == named, (result.seconds, faster)
    assert faster[named] < 0.9 * result.seconds


def test_in_a_synchronous_run_too_it_is_the_node_that_is_named_that_gains_most(
    policy: Path, tmp_path: Path
) -> None:
    """There no two of them work at a time, and what any of them saves is saved: most where most is
    spent.
    """

    def made(generator: float, trainer: float, runs: Path) -> Result:
        graph = tiny_graph(policy, max_staleness=0)
        slower = {"generator": generator, "trainer": trainer}
        for name, seconds in slower.items():
            operator = graph.operators[name]
            object.__setattr__(operator, "build", paced(operator, seconds).build)
        return run(graph, steps=12, runs=runs, quiet=True)

    result = made(0.1, 0.05, tmp_path / "as it is")
    named = Looks(RunFolder.open(result.folder), gone).look()["bottleneck"]
    faster = {
        "generator": made(0.05, 0.05, tmp_path / "g").seconds,
        "trainer": made(0.1, 0.025, tmp_path / "t").seconds,
    }
    assert named == "generator" == min(faster, key=lambda node: faster[node]), (
        result.seconds,
        faster,
        shares(result),
    )
