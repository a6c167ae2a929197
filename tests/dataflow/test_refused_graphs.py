"""Every graph that cannot work is refused before it runs, in three parts: what is wrong, what was
found, what to do.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dataflow import Graph, GraphError, Model, Stream, join, scorer
from dataflow.check import faults
from dataflow.node import Transform
from dataflow.planning.hosts import Devices
from dataflow.planning.plan import plan
from dataflow.records import SAMPLING_MASK, Array
from dataflow.testing import FakeEvaluate, FakeGenerator, FakePrompts, FakeTrainer
from operators import (
    Demonstrations,
    Generator,
    Logprobs,
    Prompts,
    RewardModel,
    Trainer,
    Values,
    episode,
)
from operators.losses import aipo, rloo, with_kl
from operators.rewards import kl_penalty

POLICY = Model("policy")
CRITIC = Model("critic", head="value")
JUDGE = Model("judge", head="score")


@scorer
def reward(completion: str, answer: str) -> float:
    return float(completion == answer)


@scorer(per="group", isolate=False)
def advantage(reward: Array) -> Array:
    return np.asarray(reward - reward.mean())


@scorer
def needs_number(answer: int) -> float:
    return float(answer)


@scorer
def needs_values(values: list[float]) -> float:
    return values[0]


@scorer
def needs_score(score: float) -> float:
    return score


@scorer
def needs_mask(sampling_mask: Array) -> float:
    return float(len(sampling_mask))


@scorer
def needs_reference(ref_logprobs: list[float]) -> float:
    return ref_logprobs[0]


def start(**knobs: object) -> tuple[Graph, FakeGenerator, Stream]:
    graph, generator = Graph("test"), FakeGenerator(model=POLICY, **knobs)
    return graph, generator, generator(graph.source(FakePrompts()))


def good(max_staleness: int = 2, **knobs: object) -> Graph:
    graph, generator, rollouts = start()
    trainer = FakeTrainer(model=POLICY, **knobs)
    trainer(advantage(reward(rollouts)))
    graph.feedback(trainer.weights, generator, max_staleness=max_staleness)
    return graph


def missing_column() -> None:
    graph, generator = Graph("test"), FakeGenerator(model=POLICY)
    reward(generator(graph.source(FakePrompts(columns={}))))


def missing_column_that_a_node_provides() -> None:
    _, _, rollouts = start()
    reward(rollouts)
    advantage(rollouts)


def missing_rollout_columns() -> None:
    reward(Graph("test").source(FakePrompts()))


def missing_reference() -> None:
    _, _, rollouts = start()
    needs_reference(rollouts)


def missing_reference_that_is_on_another_branch() -> None:
    _, _, rollouts = start()
    Logprobs(POLICY.frozen())(rollouts)
    needs_reference(rollouts)


def missing_values() -> None:
    _, _, rollouts = start()
    needs_values(rollouts)


def missing_score() -> None:
    _, _, rollouts = start()
    needs_score(rollouts)


def missing_sampling_mask() -> None:
    _, _, rollouts = start()
    needs_mask(rollouts)


def wrong_type() -> None:
    _, _, rollouts = start()
    needs_number(rollouts)


def column_written_twice() -> None:
    _, _, rollouts = start()
    needs_length.renamed("answer")(rollouts)


def generator_on_rollouts() -> None:
    _, _, rollouts = start()
    FakeGenerator(name="again", model=POLICY)(rollouts)


def duplicate_names() -> None:
    _, _, rollouts = start()
    FakeGenerator(model=POLICY)(rollouts.graph.source(FakePrompts(name="more")))


def duplicate_sources() -> None:
    graph, _, _ = start()
    graph.source(FakePrompts())


def applied_twice() -> None:
    _, _, rollouts = start()
    again = reward(rollouts)
    advantage(again)
    advantage(needs_length(again))


@scorer
def needs_length(completion: str) -> float:
    return float(len(completion))


def data_cycle() -> None:
    _, _, rollouts = start()
    reward(needs_length(reward(rollouts)))


def nobody_reads() -> None:
    graph = good()
    stream = next(c.output for c in graph.calls if c.operator.name == "generator")
    needs_length(stream)
    graph.check()


def no_source() -> None:
    Graph("test").check()


def no_feedback() -> None:
    graph, _, rollouts = start()
    FakeTrainer(model=POLICY)(advantage(reward(rollouts)))
    graph.check()


def feedback_between_models() -> None:
    graph, generator, rollouts = start()
    trainer = FakeTrainer(model=Model("critic", head="value"))
    trainer(rollouts)
    graph.feedback(trainer.weights, generator, max_staleness=1)


def feedback_to_frozen() -> None:
    graph, trainer = Graph("test"), FakeTrainer(model=POLICY)
    generator = FakeGenerator(model=POLICY.frozen())
    trainer(generator(graph.source(FakePrompts())))
    graph.feedback(trainer.weights, generator, max_staleness=1)


def feedback_to_a_stranger() -> None:
    graph = good()
    trainer = graph.operators["trainer"]
    graph.feedback(trainer.weights, FakeGenerator(name="stranger", model=POLICY), max_staleness=1)
    graph.check()


def feedback_without_weights() -> None:
    graph, generator, rollouts = start()
    graph.feedback(rollouts, generator, max_staleness=1)


def feedback_twice() -> None:
    graph = good()
    graph.feedback(
        graph.operators["trainer"].weights, graph.operators["generator"], max_staleness=1
    )


def negative_staleness() -> None:
    good(max_staleness=-1)


def fractional_staleness() -> None:
    good(max_staleness=0.5)  # type: ignore[arg-type]


def two_trainers() -> None:
    graph = good()
    scored = next(c.output for c in graph.calls if c.operator.name == "advantage")
    FakeTrainer(name="second", model=POLICY)(scored)
    graph.check()


def frozen_trainer() -> None:
    graph, _, rollouts = start()
    FakeTrainer(model=Model("judge").frozen())(rollouts)
    graph.check()


def group_of_one() -> None:
    graph, generator, rollouts = start(group_size=1)
    trainer = FakeTrainer(model=POLICY)
    trainer(advantage(reward(rollouts)))
    graph.feedback(trainer.weights, generator, max_staleness=1)
    graph.check()


def too_little_in_flight() -> None:
    graph, generator, rollouts = start(in_flight=32)
    trainer = FakeTrainer(model=POLICY, prompts_per_step=64)
    trainer(rollouts)
    graph.feedback(trainer.weights, generator, max_staleness=1)
    graph.check()


def queue_too_short() -> None:
    good(prompts_per_step=8, queue_prompts=4).check()


def unlike_temperatures() -> None:
    good(temperature=0.5).check()


def with_forward(operator: Transform, max_staleness: int | None = None) -> Graph:
    graph, generator, rollouts = start()
    trainer = FakeTrainer(model=POLICY)
    trainer(advantage(reward(operator(rollouts))))
    graph.feedback(trainer.weights, generator, max_staleness=2)
    if max_staleness is not None:
        graph.feedback(trainer.weights, operator, max_staleness=max_staleness)
    graph.check()
    return graph


def unlike_temperature_of_a_reference() -> None:
    with_forward(Logprobs(POLICY.frozen(), temperature=0.5))


def judge_that_reads_chats_as_text() -> None:
    graph = Graph("test")
    generator = Generator(POLICY.frozen(), chat=True)
    FakeEvaluate()(RewardModel(JUDGE.frozen())(generator(graph.source(FakePrompts()))))
    graph.check()


@episode
async def talk(chat: Any) -> float:
    await chat.say()
    return 1.0


def _prompts_for(reader: Any, **knobs: Any) -> None:
    graph = Graph("test")
    FakeEvaluate()(reader(graph.source(Prompts(["1+1="], **knobs))))
    graph.check()


def chats_for_a_generator_of_texts() -> None:
    _prompts_for(Generator(POLICY.frozen()), chat=True)


def texts_for_a_generator_of_chats() -> None:
    _prompts_for(Generator(POLICY.frozen(), chat=True))


def chats_for_an_episode_of_texts() -> None:
    _prompts_for(lambda stream: talk(Generator(POLICY.frozen()), stream), chat=True)


def texts_for_an_episode_of_chats() -> None:
    _prompts_for(lambda stream: talk(Generator(POLICY.frozen(), chat=True), stream))


def chats_for_demonstrations_of_texts() -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}]
    graph = Graph("test")
    FakeEvaluate()(
        Demonstrations(POLICY)(graph.source(Prompts(rows, columns=("answer",), chat=True)))
    )
    graph.check()


def evaluating_columns_of_unlike_types() -> None:
    graph, generator, evaluation = (
        Graph("test"),
        FakeGenerator(model=POLICY.frozen()),
        FakeEvaluate(),
    )
    for name, kind in (("easy", str), ("hard", int)):
        evaluation(generator(graph.source(FakePrompts(name=name, columns={"answer": kind}))))
    graph.check()


def reference_without_feedback() -> None:
    with_forward(Logprobs(POLICY))


def judge_that_is_not_frozen() -> None:
    with_forward(RewardModel(JUDGE))


def judge_with_a_language_head() -> None:
    with_forward(RewardModel(POLICY.frozen()))


def values_of_a_policy() -> None:
    with_forward(Values(POLICY.frozen()))


def logprobs_of_a_judge() -> None:
    with_forward(Logprobs(JUDGE.frozen()))


def forward_of_no_model() -> None:
    Values("critic")(start()[2])  # type: ignore[arg-type]


def no_micro_batch() -> None:
    with_forward(Values(CRITIC, micro_batch_tokens=0))


def temperature_of_zero() -> None:
    with_forward(Logprobs(POLICY.frozen(), temperature=0))


def reward_per_word() -> None:
    with_forward(RewardModel(JUDGE.frozen(), per="word"))  # type: ignore[arg-type]


def steps_cut_at_nothing() -> None:
    with_forward(RewardModel(JUDGE.frozen(), per="step", cut=""))


def replicas_of_a_forward_operator_of_nobody() -> None:
    plan(with_forward(Logprobs(POLICY.frozen())), Devices(cpus=2), replicas={"ref_logprob": 2})


def _with_generator(**knobs: Any) -> Graph:
    graph = Graph("large")
    FakeEvaluate()(Generator(POLICY, **knobs)(graph.source(FakePrompts())))
    return graph


def _trained(loss: Callable[..., Any], then: Callable[..., Any] = advantage, **knobs: Any) -> Graph:
    graph, generator = Graph("trained"), Generator(POLICY, **knobs)
    trainer = Trainer(POLICY, loss=loss, prompts_per_step=4)
    trainer(then(reward(Logprobs(POLICY.frozen())(generator(graph.source(FakePrompts()))))))
    graph.feedback(trainer.weights, generator, max_staleness=0)
    return graph


def a_penalty_that_no_ratio_knows_of() -> None:
    _trained(aipo, repetition_penalty=1.2).check()


def truncation_without_a_record() -> None:
    _trained(aipo, top_p=0.9, sampling_mask=False).check()


def truncation_before_a_scorer_that_compares() -> None:
    _trained(
        with_kl(rloo), lambda stream: advantage(kl_penalty(stream)), min_p=0.1, engine="vllm"
    ).check()


def truncation_of_a_live_run_that_records_none() -> None:
    _trained(aipo).set_knobs({"generator.top_k": 5})


def groups_that_no_edge_can_hold() -> None:
    _with_generator(group_size=64, max_tokens=1 << 23, sampling_mask=True, top_k=7).check()


def groups_that_no_column_can_hold() -> None:
    _with_generator(max_tokens=270_000, sampling_mask=True, top_k=1000).check()


def groups_of_more_replicas_than_an_edge_can_hold() -> None:
    plan(
        _with_generator(group_size=64, max_tokens=1 << 22),
        Devices(cpus=2),
        replicas={"generator": 6},
    )


def messages_smaller_than_any_header() -> None:
    plan(good(), Devices(cpus=2), message_bytes=1000)


def messages_larger_than_an_edge_holds() -> None:
    plan(good(), Devices(cpus=2), message_bytes=1 << 40)


def too_few_prompts() -> None:
    good(prompts_per_step=101).check()


def two_sources_into_a_trainer() -> None:
    graph = good()
    more = graph.operators["generator"](graph.source(FakePrompts(name="more")))
    graph.operators["trainer"](advantage(reward(more)))
    graph.check()


def evaluating_what_is_trained() -> None:
    graph = good()
    FakeEvaluate()(next(c.output for c in graph.calls if c.operator.name == "reward"))
    graph.check()


def join_of_two_sources() -> None:
    graph, generator, rollouts = start()
    join(rollouts, generator(graph.source(FakePrompts(name="more"))))


def join_of_two_graphs() -> None:
    _, _, first = start()
    _, _, second = start()
    join(first, second)


def join_of_prompts() -> None:
    prompts = Graph("test").source(FakePrompts())
    join(prompts, prompts)


def unknown_knob() -> None:
    FakeGenerator(model=POLICY, group_sise=8)


def unknown_scorer_knob() -> None:
    _, _, rollouts = start()
    reward(rollouts, scale=2)


def applied_to_no_stream() -> None:
    FakeGenerator(model=POLICY)("prompts.jsonl")  # type: ignore[arg-type]


def source_that_is_none() -> None:
    Graph("test").source(FakeGenerator(model=POLICY))  # type: ignore[arg-type]


def swap_of_nobody() -> None:
    good().swap("rewards", needs_length)


def swap_of_another_kind() -> None:
    good().swap("reward", FakeTrainer(model=POLICY))


def swap_that_breaks() -> None:
    good().swap("reward", needs_reference)


def bad_graph_name() -> None:
    Graph("my graph/1")


def bad_operator_name() -> None:
    Graph("test").source(FakePrompts(name="my prompts"))


def model_without_source() -> None:
    Model("")


def unknown_dtype() -> None:
    Model("policy", dtype="float8")


def more_gpus_than_there_are() -> None:
    plan(good(), Devices(cpus=2, gpus=4), gpus={"generator": 6, "trainer": 2})


def gpus_for_nobody() -> None:
    plan(good(), Devices(cpus=2, gpus=4), gpus={"generater": 1})


def sharing_with_nobody() -> None:
    plan(good(), Devices(cpus=2, gpus=4), gpus={"trainer": "trainer"})


def replicas_of_a_trainer() -> None:
    plan(good(), Devices(cpus=2), replicas={"trainer": 2})


REFUSED: dict[Callable[[], None], str] = {
    missing_column: (
        r"'reward' reads column 'answer', but 'generator' provides \['group_id'.*add it to Prompts"
    ),
    missing_column_that_a_node_provides: r"'advantage' reads column 'reward'.*'reward' provides it",
    missing_rollout_columns: r"'reward' reads column 'completion', but 'prompts'.*Generator",
    missing_reference: (
        r"reads column 'ref_logprobs'.*apply Logprobs\(model.frozen\(\), name=\"ref_logprobs\"\)"
        r" first"
    ),
    missing_reference_that_is_on_another_branch: (
        r"reads column 'ref_logprobs'.*'ref_logprobs' provides it.*join"
    ),
    missing_values: r"reads column 'values'.*apply Values\(Model\(..., head=\"value\"\)\) first",
    missing_score: r"reads column 'score'.*apply RewardModel\(Model\(.*head=\"score\"\)",
    missing_sampling_mask: r"reads column 'sampling_mask'.*give it sampling_mask=True",
    wrong_type: (
        r"reads column 'answer' as int \(int64\), but 'generator' provides it as string; change"
    ),
    column_written_twice: (
        r"writes column 'answer', but the rows of 'generator' have it already; rename"
    ),
    generator_on_rollouts: r"writes column 'rollout_id', but",
    duplicate_names: r"two operators are called 'generator'.*another name",
    duplicate_sources: r"two sources are called 'prompts'; give one of them another name",
    applied_twice: r"'advantage' is applied twice to rows of 'prompts'.*renamed",
    data_cycle: r"'reward' would read its own output.*cycle.*feedback",
    nobody_reads: r"nobody reads the stream of 'needs_length'.*apply",
    no_source: r"has no source, only \[\]; start it with",
    no_feedback: (
        r"'trainer' trains 'policy' but 'generator' would never see the new weights; add g.feedback"
    ),
    feedback_between_models: (
        r"'trainer' trains 'critic' but 'generator' reads 'policy'.*give both the same"
    ),
    feedback_to_frozen: r"'generator' reads frozen 'policy', which never changes; drop",
    feedback_to_a_stranger: r"a feedback names 'stranger', but the graph only has.*apply",
    feedback_without_weights: (
        r"g.feedback carries weights, but got a Stream; give it trainer.weights"
    ),
    feedback_twice: r"'generator' already has a feedback from 'trainer'; drop one",
    negative_staleness: r"max_staleness counts versions and cannot be -1; use 0",
    fractional_staleness: r"max_staleness counts versions and cannot be 0.5; use 0",
    two_trainers: r"'trainer' and 'second' both train 'policy'.*join",
    frozen_trainer: r"'trainer' trains 'judge', which is frozen\(\); give it",
    group_of_one: (
        r"'advantage' compares the rollouts of a group, but the groups of 'prompts' have 1 rollout;"
        r" raise"
    ),
    too_little_in_flight: (
        r"'generator' may hold 32 prompts in flight but one step of 'trainer' needs 64.*deadlock"
    ),
    queue_too_short: r"'trainer' may queue 4 prompts but one of its steps needs 8.*deadlock; raise",
    unlike_temperatures: (
        r"'generator' samples at temperature 1.0 but 'trainer' .* at 0.5.*same temperature"
    ),
    a_penalty_that_no_ratio_knows_of: (
        r"with repetition_penalty=1.2, and 'trainer' compares.*leave it out"
    ),
    truncation_without_a_record: (
        r"with top_p=0.9 and no sampling_mask, and 'trainer' .*give it sampling_mask=True"
    ),
    truncation_before_a_scorer_that_compares: (
        r"min_p=0.1 and no .*'kl_penalty' compares.*leave it out"
    ),
    truncation_of_a_live_run_that_records_none: (
        r"with top_k=5 and no .*give it sampling_mask=True from the start"
    ),
    unlike_temperature_of_a_reference: (
        r"at temperature 1.0 but 'ref_logprobs' computes .* at 0.5.*same temperature"
    ),
    judge_that_reads_chats_as_text: (
        r"'generator' lays prompts out as chat.*'score' would read.*give 'score' chat=True"
    ),
    chats_for_a_generator_of_texts: (
        r"'prompts' issues prompts as chat messages but 'generator' would go on from their"
        r" JSON.*'generator' chat=True"
    ),
    texts_for_a_generator_of_chats: (
        r"'prompts' issues prompts as texts but 'generator' lays out chat messages; give 'prompts'"
        r" chat=True.*"
        r"or 'generator' chat=False"
    ),
    chats_for_an_episode_of_texts: (
        r"chat messages but 'talk' would go on from their JSON.*'generator' chat=True"
    ),
    texts_for_an_episode_of_chats: (
        r"as texts but 'talk' lays out chat messages; give 'prompts' chat=True.*'generator'"
    ),
    chats_for_demonstrations_of_texts: (
        r"chat messages but 'demonstrations' would go on.*'demonstrations' chat=True"
    ),
    evaluating_columns_of_unlike_types: (
        r"'eval' evaluates rows of several sources as one table, but column 'answer' is string in"
        r" those of 'easy' and "
        r"int64 in those of 'hard'; convert"
    ),
    reference_without_feedback: (
        r"'trainer' trains 'policy' but 'ref_logprobs' would never see.*or give it a frozen"
    ),
    judge_that_is_not_frozen: (
        r"'score' reads 'judge', which is not frozen\(\).*none of \['trainer'\] trains; give"
    ),
    judge_with_a_language_head: (
        r"'score' needs a model with head 'score', but 'policy' has head 'lm'; give it"
    ),
    values_of_a_policy: (
        r"'values' needs a model with head 'value', but 'policy' has head 'lm'; give it"
    ),
    logprobs_of_a_judge: (
        r"'ref_logprobs' needs a model with head 'lm', but 'judge' has head 'score'; give it"
    ),
    forward_of_no_model: r"'values' reads with 'critic', which is no Model; give",
    no_micro_batch: r"'values' has micro_batch_tokens=0; give",
    temperature_of_zero: r"'ref_logprobs' has temperature=0; give",
    reward_per_word: r"'score' has per='word', which is not known; use",
    steps_cut_at_nothing: r"'score' has cut=''; give",
    replicas_of_a_forward_operator_of_nobody: (
        r"devices are given to 'ref_logprob'.*did you mean 'ref_logprobs'"
    ),
    groups_that_no_edge_can_hold: (
        r"64 rollouts of 8388608 tokens and \d+ bytes, but a data edge holds .*top_k"
    ),
    groups_that_no_column_can_hold: (
        r"2160000000 numbers in .* 'sampling_mask', .*holds 2147483647; lower.*top_k"
    ),
    groups_of_more_replicas_than_an_edge_can_hold: (
        r"\d+ bytes, \d+ from 6 replicas, but .* holds 17179869184"
    ),
    messages_smaller_than_any_header: (
        r"at most 1000 bytes, which is not from 65536 to .*give message_bytes"
    ),
    messages_larger_than_an_edge_holds: (
        r"at most 1099511627776 bytes, .* to 17179869184, all that an edge holds; give"
    ),
    too_few_prompts: r"'prompts' ends after 100 prompts .*needs 101; give more",
    two_sources_into_a_trainer: r"'trainer' would train on rows of 2 sources.*mix them",
    evaluating_what_is_trained: (
        r"trained by 'trainer' and evaluated by 'eval'; evaluate prompts of their own"
    ),
    join_of_two_sources: r"join got rows of two sources, 'prompts' and 'more'.*join branches",
    join_of_two_graphs: r"join got streams of two graphs.*one Graph",
    join_of_prompts: r"join needs rollouts, but 'prompts' sends prompts; apply a generator",
    unknown_knob: r"FakeGenerator has no knob 'group_sise' .*did you mean 'group_size'",
    unknown_scorer_knob: r"'reward' .* has no knob 'scale'",
    applied_to_no_stream: (
        r"'generator' is applied to str 'prompts.jsonl', which is no stream; apply"
    ),
    source_that_is_none: r"g.source takes a source, but got FakeGenerator",
    swap_of_nobody: r"no operator 'rewards' to swap.*did you mean 'reward'",
    swap_of_another_kind: r"'reward' is a operator and .*swap like for like",
    swap_that_breaks: r"'reward' reads column 'ref_logprobs'",
    bad_graph_name: r"name becomes a folder, but 'my graph/1' cannot; use",
    bad_operator_name: r"name becomes a column and a file, but 'my prompts' cannot; use",
    model_without_source: r"a Model needs a Hugging Face folder or id, but got ''; give",
    unknown_dtype: r"Model knob 'dtype' is 'float8', which is not known; use one of",
    more_gpus_than_there_are: r"asks for 8 GPUs, .* but this machine has 4; ask for fewer",
    gpus_for_nobody: r"devices are given to 'generater'.*did you mean 'generator'",
    sharing_with_nobody: (
        r"'trainer' is to share the devices of 'trainer', which has none of its own; name"
    ),
    replicas_of_a_trainer: r"'trainer' cannot run as 2 replicas",
}


@pytest.mark.parametrize("build", REFUSED, ids=lambda build: build.__name__)
def test_a_graph_that_cannot_work_is_refused_and_the_message_says_what_to_do(
    build: Callable[[], None],
) -> None:
    with pytest.raises(GraphError) as refused:
        build()
    assert re.search(REFUSED[build], str(refused.value), re.DOTALL), str(refused.value)


def test_a_good_graph_has_no_faults() -> None:
    assert list(faults(good())) == []


def test_forward_operators_with_models_that_stay_or_are_fed_are_no_fault() -> None:
    assert list(faults(with_forward(RewardModel(JUDGE.frozen())))) == []
    assert (
        list(faults(with_forward(Logprobs(POLICY, name="proximal_logprobs"), max_staleness=0)))
        == []
    )


def test_the_temperature_of_a_critics_trainer_is_nobodys_concern() -> None:
    graph, generator, rollouts = start(temperature=0.5)
    values, trainer = Values(CRITIC), FakeTrainer(model=POLICY, temperature=0.5)
    critic = FakeTrainer(name="critic", model=CRITIC)
    stream = advantage(reward(values(rollouts)))
    trainer(stream)
    critic(stream)
    graph.feedback(trainer.weights, generator, max_staleness=0)
    graph.feedback(critic.weights, values, max_staleness=0)
    assert list(faults(graph)) == []


def test_what_truncation_leaves_is_recorded_by_itself_and_as_long_as_a_run_goes_on() -> None:
    truncated, plain = _trained(aipo, top_p=0.7), _trained(aipo, sampling_mask=True)
    assert SAMPLING_MASK in Generator(POLICY, top_k=5).provides({})
    assert SAMPLING_MASK not in Generator(POLICY, top_k=5, engine="vllm").provides({})
    for graph in (truncated, plain, truncated.set_knobs({"generator.top_p": 1.0})):
        assert list(faults(graph)) == []
        assert SAMPLING_MASK in graph.set_knobs({"generator.min_p": 0.1}).operators[
            "generator"
        ].provides({})
    assert SAMPLING_MASK not in _trained(aipo).set_knobs({"generator.top_p": 1.0}).operators[
        "generator"
    ].provides({})


def test_losses_without_a_ratio_may_be_of_any_sampling() -> None:
    for knobs in ({"repetition_penalty": 1.2}, {"top_p": 0.9, "engine": "vllm"}):
        assert list(faults(_trained(with_kl(rloo), **knobs))) == []


def test_a_graph_that_trains_nothing_may_read_with_any_model() -> None:
    graph, _, rollouts = start()
    FakeEvaluate()(Values(CRITIC)(rollouts))
    assert list(faults(graph)) == []


def test_every_reason_to_refuse_is_reached_by_some_graph_here() -> None:
    import inspect

    from dataflow import check

    named = {function.__name__ for function in check._REASONS}
    defined = {
        name
        for name, function in inspect.getmembers(check, inspect.isfunction)
        if inspect.isgeneratorfunction(function) and function.__module__ == check.__name__
    } - {"faults"}
    assert named == defined
