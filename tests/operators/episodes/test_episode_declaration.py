"""Graphs with episodes: what is declared, drawn and planned, and what is refused."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from dataflow import Devices, Graph, GraphError, Model, Stream, plan, scorer
from dataflow.planning.hosts import Host
from dataflow.planning.wiring import edges, graph_around
from dataflow.records import TURN_ANSWER, TURN_REQUEST
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from operators import Evaluate, Generator, Prompts, episode
from operators.episodes.declaration import Episode

MODEL = Model("policies/none")


@episode(max_turns=3)
async def guess(chat: Any, answer: str, blank: bool = False) -> float:
    """Says it once."""
    await chat.say()
    return 1.0


@scorer(isolate=False)
def reward(guess: float) -> float:
    return guess


def graph(**knobs: Any) -> tuple[Graph, Generator]:
    g = Graph("episodes")
    generator = Generator(MODEL, group_size=2, **knobs)
    trainer = FakeTrainer(model=MODEL, prompts_per_step=4)
    held_out = Prompts(
        [{"prompt": "a", "answer": "b"}], columns=("answer",), name="held_out", group_size=1
    )
    trainer(reward(guess(generator, g.source(FakePrompts()))))
    Evaluate(every_steps=5)(reward(guess(generator, g.source(held_out))))
    g.feedback(trainer.weights, generator, max_staleness=1)
    return g, generator


def test_one_episode_serves_several_sources_and_shares_the_generator() -> None:
    g, _ = graph()
    g.check()
    assert list(g.operators) == [
        "prompts",
        "generator",
        "guess",
        "reward",
        "trainer",
        "held_out",
        "eval",
    ]
    assert {data["plane"] for *_, data in g.nx.edges("guess", data=True)} == {"data", "turns"}
    assert ("guess", "generator") in g.nx.edges() and ("generator", "guess") not in g.nx.edges()


def test_turns_travel_on_two_edges_of_their_own_with_room_for_all_rollouts_in_flight() -> None:
    g, _ = graph()
    turns = [edge for edge in edges(g) if edge.plane == "turns"]
    assert [(edge.name, dict(edge.columns)) for edge in turns] == [
        ("guess>generator:guess", dict(TURN_REQUEST)),
        ("generator>guess:guess", dict(TURN_ANSWER)),
    ]
    arriving = [edge for edge in edges(g) if edge.consumer == "guess" and edge.plane == "data"]
    assert len(arriving) == 2
    assert all(
        edge.capacity_rows >= sum(2 * each.capacity_rows for each in arriving) for edge in turns
    )


def test_rollouts_of_episodes_are_bounded_as_if_the_generator_drew_them_whole() -> None:
    g, _ = graph()
    made = plan(g, Devices(cpus=4), steps=7)
    assert made.bounds["prompts"].max_staleness == 1 and made.bounds["prompts"].steps == 7
    facts = graph_around(g, made, "generator")
    assert facts.episodes == ("guess",) and facts.columns == {}
    assert facts.bounds == made.bounds
    assert made.placements["guess"].worker == "guess", "outside the generator's process"


def test_an_episode_takes_no_threads_and_no_accelerator_from_those_that_compute() -> None:
    g, _ = graph()
    made = plan(g, Devices(cpus=4, gpus=2), gpus={"generator": 1, "trainer": 1})
    assert not made.placements["guess"].gpus
    cores = plan(g, Devices(cpus=4))
    assert cores.placements["generator"].threads_of(0) == 2
    with pytest.raises(
        GraphError, match="'guess' is given 1 GPUs, but it uses no device; leave it out"
    ):
        plan(g, Devices(cpus=4, gpus=2), gpus={"generator": 1, "guess": 1})


def test_a_swapped_generator_is_asked_for_the_turns() -> None:
    g, _ = graph()
    other = g.swap("generator", Generator(MODEL, group_size=3))
    assert other.operators["guess"].asks is other.operators["generator"]  # type: ignore[attr-defined]
    assert other.operators["guess"].rollouts_per_prompt == 3  # type: ignore[attr-defined]


def test_called_without_a_stream_it_is_the_function() -> None:
    class Chat:
        async def say(self) -> str:
            return "a"

    coroutine = guess(Chat(), answer="b")
    with pytest.raises(StopIteration) as over:
        coroutine.send(None)
    assert over.value.value == 1.0


def test_what_is_returned_and_what_is_a_turn_are_columns() -> None:
    g, _ = graph(top_k=4, sampling_mask=True)
    columns = next(call.output.columns for call in g.calls if call.operator.name == "guess")
    assert list(columns)[-8:] == [
        "sampling_mask",
        "turn",
        "turn_reward",
        "training_row",
        "row_conversation",
        "row_role",
        "row_branch_turn",
        "guess",
    ]


async def plain(chat: Any, answer: str) -> None: ...


async def returns_list(chat: Any) -> list[float]:
    return []


async def takes_many(chat: Any, *answers: str) -> None: ...


def not_async(chat: Any) -> None: ...


def applied(made: Episode, generator: Any = None, columns: Any = None) -> Stream[Any]:
    g = Graph("refused")
    prompts = FakePrompts() if columns is None else FakePrompts(columns=columns)
    return made(generator or Generator(MODEL), g.source(prompts))  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no async function": (
        lambda: episode(not_async),
        r"needs an async function, but got 'not_async' .*; write `async",
    ),
    "a return type": (
        lambda: episode(returns_list),
        r"returns list\[float\], which no .*; annotate it -> float",
    ),
    "parameters": (
        lambda: episode(takes_many),
        r"takes \['chat.*', '\*answers.*'\].*; write `async def takes_many",
    ),
    "an unknown knob": (
        lambda: Episode(function=plain, max_turn=3),
        "Episode has no knob 'max_turn'.*max_turns",
    ),
    "an unknown knob of the function": (
        lambda: guess(Generator(MODEL), Graph("g").source(FakePrompts()), blnk=True),
        "has no knob 'blnk'.*'blank'",
    ),
    "a stream alone": (
        lambda: guess(Graph("g").source(FakePrompts())),
        r"got \['Stream'\]; write guess\(generator, ",
    ),
    "a generator that takes no turns": (
        lambda: applied(guess, FakeGenerator()),
        r"got FakeGenerator\(name='generator'\); give it Generator",
    ),
    "a missing column": (
        lambda: applied(guess, columns={}),
        "'guess' reads column 'answer', but 'prompts' provides",
    ),
    "a column's type": (
        lambda: applied(guess, columns={"answer": int}),
        "reads column 'answer' as str .*; change the",
    ),
    "no turns": (
        lambda: applied(dataclasses.replace(guess, max_turns=0)),
        "has max_turns=0; give a whole number",
    ),
    "no time": (
        lambda: applied(dataclasses.replace(guess, timeout_s=0)),
        "has timeout_s=0; give seconds above 0",
    ),
    "another past": (
        lambda: applied(dataclasses.replace(guess, past="kept")),
        "has past='kept'; give one of ",
    ),
    "processes inside the worker": (
        lambda: applied(dataclasses.replace(guess, isolate=False, processes=2)),
        "but isolate=False; leave isolate=T",
    ),
    "its own column": (
        lambda: applied(episode(name="answer")(guess.function)),
        "writes column 'answer', which it also reads; give",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_episode_that_could_not_run_is_refused(what: str) -> None:
    make, text = REFUSED[what]
    with pytest.raises(GraphError, match=text):
        make()


def test_an_episode_may_have_replicas_and_their_number_is_that_of_the_start() -> None:
    g, _ = graph()
    made = plan(
        g,
        Devices(cpus=4),
        replicas={"guess": 2, "generator": 3},
        scale={5: {"guess": 2, "generator": 1}},
    )
    assert (made.placements["guess"].replicas, made.placements["generator"].replicas) == (2, 3)
    for count in (1, 3):
        with pytest.raises(
            GraphError, match=f"of 2 replicas, and cannot have {count} from some step"
        ):
            plan(g, Devices(cpus=4), replicas={"guess": 2}, scale={5: {"guess": count}})


def test_an_episode_may_be_on_another_host_than_its_generator() -> None:
    g, _ = graph()
    hosts = Devices.of([Host(name="a", cpus=4), Host(name="b", cpus=4)])
    made = plan(g, hosts, place={"generator": "a", "guess": "b"})
    assert made.placements["guess"].hosts == ("b",) and made.placements["generator"].hosts == ("a",)
