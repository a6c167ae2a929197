"""Laws of the trainer's runtime: order of issue, drops with reasons, how a step is recorded."""

import functools
import json

import pytest
import torch
from rigs.operators import make_context
from safetensors.torch import load_file
from trainer_rig import (
    COLUMNS,
    VOCABULARY,
    group,
    rig,
    rows_of,
    tiny_learner,
    tiny_llama,
    tiny_trainer,
)
from transformers import AutoModelForCausalLM

from dataflow.errors import GraphError, OperatorError
from dataflow.model import Model
from dataflow.runtime import Batch
from operators.losses import aipo
from operators.trainer import Trainer
from operators.training.checkpoints import checkpoint
from operators.training.runtime import TrainerRuntime

METRICS = {
    "step",
    "version",
    "seconds",
    "loss",
    "reward_mean",
    "advantage_std",
    "staleness_mean",
    "staleness_max",
    "ratio_mean",
    "truncated_share",
    "kl",
    "grad_norm",
    "completion_tokens_mean",
    "generated_tokens_per_s",
    "trained_tokens_per_s",
    "dropped",
    "seconds_wait",
    "seconds_forward_backward",
    "seconds_optimizer",
    "seconds_publish",
    "seconds_record",
    "weights_sent",
}


def test_groups_are_trained_in_the_order_of_their_issue_however_they_arrive(tmp_path):
    world = rig(tmp_path)
    for number in (3, 1, 2):
        world.push(group(number))
        world.run()
    assert world.folder.rollouts == {}
    world.push(group(0))
    world.run()
    assert world.folder.rollouts == {1: [0, 1], 2: [2, 3]}
    assert world.ledger.steps == {1: ([0, 1], {}), 2: ([2, 3], {})}


def test_the_order_of_arrival_changes_no_bit_of_the_weights(tmp_path):
    ends = []
    for name, order in (("a", [0, 1, 2, 3]), ("b", [3, 2, 1, 0])):
        (tmp_path / name).mkdir()
        world = rig(tmp_path / name)
        for number in order:
            world.push(group(number))
        world.run()
        ends.append(world.plane.published[2])
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU its seeds are set at once")
def test_the_seed_of_a_step_leaves_nothing_for_a_gpu_that_is_not_there(tmp_path):
    before = len(torch.cuda._queued_calls)
    world = rig(tmp_path)
    world.push(*map(group, range(4)))
    world.run()
    assert len(world.ledger.steps) == 2 and len(torch.cuda._queued_calls) == before


def test_a_group_that_comes_twice_is_trained_once(tmp_path):
    world = rig(tmp_path)
    world.push(group(0), group(1))
    world.run()
    world.push(group(1), group(0))
    world.push(group(2))
    world.push(group(2), group(3))
    world.run()
    assert world.ledger.steps == {1: ([0, 1], {}), 2: ([2, 3], {})}
    assert sorted(world.acks) == [0, 1, 2, 2]


def test_a_group_whose_rollouts_all_failed_is_dropped_and_another_takes_its_place(tmp_path):
    world = rig(tmp_path)
    world.push(group(0, error="scorer timed out"), group(1), group(2))
    world.run()
    assert world.ledger.steps == {1: ([1, 2], {0: "failed"})}
    assert world.folder.rollouts == {1: [1, 2]}
    assert world.folder.metrics[0]["dropped"] == {"failed": 1}


def test_a_drop_is_told_to_the_generators_before_the_step_is_made(tmp_path):
    world = rig(tmp_path)
    world.push(group(0, error="scorer timed out"), group(1))
    world.run()
    assert world.plane.notes == [{"dropped": 0, "version": 0}, {"dropped": 1, "version": 0}]
    assert world.runtime.status()["dropped"] == 1
    assert list(world.plane.published) == [0]


def test_stale_groups_are_dropped_by_the_trainer(tmp_path):
    world = rig(tmp_path, max_staleness=1)
    world.push(*[group(number, version=0) for number in range(6)])
    world.push(group(6, version=1), group(7, version=2))
    world.run()
    assert world.ledger.steps[3] == ([6, 7], {})
    assert world.ledger.drops == {4: "stale", 5: "stale"}
    assert world.folder.metrics[2]["dropped"] == {"stale": 2}
    assert [line["staleness_max"] for line in world.folder.metrics] == [0, 1, 1]


def test_without_a_feedback_edge_nothing_is_stale(tmp_path):
    world = rig(tmp_path, max_staleness=None)
    world.push(*[group(number, version=0) for number in range(6)])
    world.run()
    assert list(world.ledger.steps) == [1, 2, 3]


def test_the_run_ends_with_the_last_error_when_every_group_fails(tmp_path):
    world = rig(tmp_path)
    with pytest.raises(
        OperatorError, match=r"trained none.*the last failure: scorer timed out; mend"
    ):
        for number in range(100):
            world.push(group(number, error="scorer timed out"))
            world.run()
    assert world.folder.metrics == []


@pytest.mark.parametrize(("size", "groups"), [(8, 16), (4, 16), (2, 32), (1, 64)])
def test_a_run_whose_rollouts_all_fail_alike_ends_after_as_many_as_a_user_waits_for(
    size, groups, tmp_path
):
    """However many groups a step has."""
    world = rig(tmp_path, tiny_trainer(prompts_per_step=64))
    with pytest.raises(
        OperatorError,
        match=r"failed alike: \{'judge: hung': \d+\}, the last failure: judge: hung: no",
    ):
        for number in range(100):
            world.push(group(number, size=size, error=f"judge: hung: no answer of {number}"))
            world.run()
    assert number + 1 == groups


@pytest.mark.parametrize("other", [None, "judge: raised: KeyError: 'a'", "the data are bad"])
def test_failures_of_several_causes_and_rollouts_between_them_are_waited_for_longer(
    other, tmp_path
):
    world = rig(tmp_path, tiny_trainer(prompts_per_step=64))
    for number in range(48):
        world.push(
            group(number, size=8, error=other if number % 16 == 10 else "judge: hung: no answer")
        )
        world.run()
    assert world.runtime.status()["dropped"] == 48 - 3 * (other is None)


def test_prompts_that_are_too_long_are_no_world_that_is_dead(tmp_path):
    """One after the other, as in data that nobody has shuffled."""
    world = rig(tmp_path, tiny_trainer(prompts_per_step=64))
    for number in range(48):
        world.push(group(number, size=8, error="generator: too_long: the prompt is too long"))
        world.run()
    assert world.runtime.status()["dropped"] == 48


def test_a_step_is_recorded_then_published_and_only_then_acknowledged(tmp_path):
    world = rig(tmp_path, tiny_trainer(checkpoint_every=1))
    world.runtime.push(
        Batch("prompts", group(0), "reward", lambda group: world.events.append("ack 0"))
    )
    world.runtime.push(
        Batch("prompts", group(1), "reward", lambda group: world.events.append("ack 1"))
    )
    world.run()
    world.runtime.close()
    beside = [("flush rollouts", 1), ("flush",), ("checkpoint", 1)]
    assert [event for event in world.events if event in beside] == beside
    assert [event for event in world.events if event not in beside] == [
        ("publish", 0),
        ("rollouts", 1),
        ("ledger", 1),
        ("publish", 1),
        ("metrics", 1),
        "ack 0",
        "ack 1",
        ("recorded", 1),
    ]
    assert world.events.index(("ledger", 1)) < world.events.index(beside[0])


def test_the_published_weights_are_those_that_were_trained(tmp_path):
    module = tiny_llama()
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    world = rig(tmp_path, module=module)
    world.push(group(0), group(1))
    world.run()
    after = dict(module.named_parameters())
    assert set(world.plane.published[1]) == set(after)
    assert all(torch.equal(world.plane.published[1][name], after[name]) for name in after)
    assert any(not torch.equal(before[name], after[name]) for name in after)


def test_one_call_of_work_does_one_micro_batch(tmp_path):
    world = rig(tmp_path, tiny_trainer(micro_batch_tokens=1, skip_zero_advantage=False))
    world.push(group(0, size=3), group(1, size=3))
    for _ in range(6):
        assert world.runtime.work() == []
        assert world.folder.metrics == []
        assert world.runtime.pending() == 6
    assert world.runtime.work() == []
    assert len(world.folder.metrics) == 1
    assert world.runtime.work() is None
    assert world.runtime.pending() == 0


def test_a_step_writes_every_figure_of_the_design(tmp_path):
    world = rig(tmp_path)
    world.push(group(0, size=4), group(1, size=4, version=0))
    world.run()
    (line,) = world.folder.metrics
    assert set(line) >= METRICS
    json.dumps(line)
    rows = [row for batch in (group(0, size=4), group(1, size=4)) for row in batch.to_pylist()]
    assert line["reward_mean"] == pytest.approx(sum(row["reward"] for row in rows) / 8)
    assert line["completion_tokens_mean"] == pytest.approx(
        sum(sum(row["mask"]) for row in rows) / 8
    )
    assert line["trained_tokens_per_s"] * line["seconds_step"] == pytest.approx(
        sum(sum(r["mask"]) for r in rows)
    )
    assert line["generated_tokens_per_s"] == pytest.approx(line["trained_tokens_per_s"])
    assert line["version"] == line["step"] == 1


def test_the_run_ends_after_its_steps_with_a_checkpoint_of_the_last(tmp_path):
    world = rig(tmp_path, steps=2)
    world.push(*[group(number) for number in range(6)])
    world.run()
    assert world.runtime.status()["done"] == 1
    assert world.runtime.status()["step"] == 2
    assert [event for event in world.events if event[0] == "checkpoint"] == [("checkpoint", 2)]
    assert world.runtime.work() is None


def test_draining_ends_the_step_under_way_and_keeps_a_checkpoint(tmp_path):
    world = rig(tmp_path)
    world.push(*[group(number) for number in range(4)])
    world.runtime.work()
    world.runtime.tell({"drain": True})
    world.run()
    assert world.ledger.steps == {1: ([0, 1], {})}
    assert ("checkpoint", 1) in world.events
    assert world.runtime.status()["done"] == 1
    assert world.ledger.drops == {}


def test_at_the_end_of_the_rows_what_is_too_little_for_a_step_is_dropped_with_a_reason(tmp_path):
    world = rig(tmp_path)
    world.push(*[group(number) for number in range(3)])
    world.run()
    assert world.runtime.pending() == 0
    world.runtime.tell({"end": True})
    world.run()
    assert world.ledger.drops == {2: "too few for a step"}
    assert world.acks == [0]
    assert ("checkpoint", 1) in world.events
    assert world.runtime.status()["done"] == 1


def test_the_buffer_is_never_full_for_the_group_that_is_next(tmp_path):
    world = rig(tmp_path, tiny_trainer(queue_prompts=2), max_staleness=None)
    for number in range(1, 9):
        assert world.runtime.room() > 0
        world.push(group(number))
    world.push(group(0))
    assert world.runtime.room() == 0
    world.run()
    assert world.runtime.room() > 0
    assert world.runtime.status()["step"] == 4


def test_a_step_that_is_not_finite_leaves_the_weights_alone_and_drops_its_groups(tmp_path):
    module = tiny_llama()
    before = [weight.detach().clone() for weight in module.parameters()]
    world = rig(tmp_path, module=module)
    world.push(group(0, advantages=[float("nan"), 1.0, -1.0]), group(1))
    world.run()
    assert all(
        torch.equal(one, other) for one, other in zip(before, module.parameters(), strict=True)
    )
    assert world.runtime.status()["skipped_steps"] == 1
    assert world.runtime.status()["dropped"] == 2
    assert list(world.plane.published) == [0]
    world.push(group(2), group(3))
    world.run()
    assert world.ledger.steps == {1: ([2, 3], {})}
    assert world.ledger.drops == {0: "non-finite", 1: "non-finite"}
    assert world.folder.metrics[0]["dropped"] == {"non-finite": 2}
    assert world.folder.metrics[0]["skipped_steps"] == 1


def test_five_steps_in_a_row_that_are_not_finite_end_the_run_and_name_the_rollouts(tmp_path):
    world = rig(tmp_path)
    with pytest.raises(
        OperatorError, match=r"skipped 5 steps in a row.*found the loss of rollouts \[24\]; look at"
    ):
        for number in range(0, 20, 2):
            world.push(group(number, advantages=[float("inf"), 0.0, 0.0]), group(number + 1))
            world.run()
    assert world.folder.metrics == []


@pytest.mark.parametrize("factor", ["inf", "nan"])
def test_a_gradient_that_is_not_finite_names_its_parameter(tmp_path, factor):
    world = rig(tmp_path)
    weight = dict(world.runtime._learner.forward.module.named_parameters())["model.norm.weight"]
    weight.register_hook(lambda grad: grad * float(factor))
    with pytest.raises(OperatorError, match=r"found the gradient of 'model.norm.weight'"):
        for number in range(0, 20, 2):
            world.push(group(number), group(number + 1))
            world.run()


def test_training_makes_the_better_rollouts_likelier(tmp_path):
    good, bad = [1.0, -1.0], [-1.0, 1.0]
    world = rig(tmp_path, tiny_trainer(prompts_per_step=1, normalize="rollouts"))
    policy = world.runtime._learner.forward
    for number, advantages in ((0, good), (1, bad)):
        probe = group(number, size=2, seed=number, advantages=advantages)
        before = _likelihoods(policy, probe)
        world.push(probe)
        world.run()
        change = _likelihoods(policy, probe) - before
        assert (change[0] - change[1]) * advantages[0] > 0


def _likelihoods(policy, batch):
    module = policy.module
    was = module.config._attn_implementation
    module.set_attn_implementation("sdpa")
    sums = []
    with torch.no_grad():
        for row in batch.to_pylist():
            logits = module(torch.tensor([row["tokens"]])).logits[0].log_softmax(-1)
            chosen = [at for at in range(1, len(row["tokens"])) if row["mask"][at]]
            sums.append(sum(logits[at - 1, row["tokens"][at]] for at in chosen))
    module.set_attn_implementation(was)
    return torch.stack(sums)


def test_a_checkpoint_is_a_folder_that_transformers_loads_and_has_no_pickle(tmp_path):
    world = rig(tmp_path, steps=1)
    world.push(group(0), group(1))
    world.run()
    folder = tmp_path / "step-000001"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    trained = dict(world.runtime._learner.forward.module.named_parameters())
    assert all(torch.equal(weight, trained[name]) for name, weight in loaded.named_parameters())
    assert loaded(torch.tensor([[2, 3]])).logits.shape == (1, 2, VOCABULARY)
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {
        ".json",
        ".safetensors",
    }
    assert json.loads((folder / "trainer_state.json").read_text())["step"] == 1


def test_optimiser_state_comes_back_from_a_checkpoint_bit_for_bit(tmp_path):
    def steps(learner, numbers):
        losses = []
        for number in numbers:
            rows = _rows(number)
            for part in learner.begin(rows, 0):
                learner.micro(part)
            losses.append(learner.end(1e-2).loss)
        return losses

    trainer = tiny_trainer()
    straight = tiny_learner(trainer)
    steps(straight, [0, 1])
    checkpoint.save(tmp_path, straight, None, {"step": 2})
    wanted = steps(straight, [2, 3])
    again = tiny_learner(trainer, AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    checkpoint.restore(again, 0, 1, tmp_path)
    assert steps(again, [2, 3]) == wanted
    fresh = tiny_learner(trainer, AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    assert steps(fresh, [2, 3]) != wanted
    (shard,) = (tmp_path / checkpoint.OPTIMIZER_FOLDER).iterdir()
    assert len(load_file(shard)) == 3 * len(straight.parameters)


def _rows(number):
    return rows_of(group(2 * number), group(2 * number + 1))


def test_a_trainer_of_two_sources_is_refused():
    context = make_context(node="trainer", columns={"a": COLUMNS, "b": COLUMNS})
    with pytest.raises(GraphError, match=r"2 lead to it: \['a', 'b'\]"):
        TrainerRuntime(tiny_trainer(), context, tiny_learner(tiny_trainer()), None)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"prompts_per_step": 0}, "prompts_per_step=0"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"checkpoint_dtype": "fp8"}, "checkpoint_dtype='fp8'"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"betas": (0.9, 1.0)}, "betas="),
        ({"max_grad_norm": 0}, "max_grad_norm=0"),
        ({"normalize": "words"}, "normalize='words'"),
        ({"micro_batch_tokens": 1.5}, "micro_batch_tokens=1.5"),
        ({"checkpoint_every": 0}, "checkpoint_every=0"),
        ({"recover_within_s": 0.0}, "recover_within_s=0.0; give a number above 0, or inf"),
        ({"queue_prompts": 1}, "would deadlock"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"loss": "aipo"}, "loss is 'aipo'"),
        ({"loss": functools.partial(aipo, roh=2.0)}, "did you mean 'rho'"),
        ({"loss": lambda logprobs, advantage: logprobs}, "has no gradient"),
        ({"loss": lambda new_logprobs, *rest: new_logprobs}, "has '*rest'"),
    ],
)
def test_knobs_that_cannot_be_right_are_refused_in_three_parts(knobs, said):
    faults = tiny_trainer(**knobs).faults()
    assert any(said in fault for fault in faults), faults
    assert all(";" in fault and "'trainer'" in fault for fault in faults)


def test_a_fault_of_the_loss_names_its_file_and_line():
    def nothing(advantage):
        return advantage

    (fault,) = tiny_trainer(loss=nothing).faults()
    line = nothing.__code__.co_firstlineno
    assert f"test_trainer.py:{line}" in fault


def test_a_trainer_without_faults_reads_what_its_loss_names():
    def kl(new_logprobs, ref_logprobs, logprobs, advantage, beta=0.1):
        return new_logprobs

    trainer = Trainer(Model("m"), loss=functools.partial(kl, beta=0.2))
    assert trainer.faults() == []
    wanted = {
        "ref_logprobs",
        "logprobs",
        "advantage",
        "tokens",
        "mask",
        "versions",
        "finish_reason",
        "error",
    }
    assert set(trainer.reads()) == wanted
    assert trainer.knobs()["loss"] == "kl(beta=0.2)"
    assert trainer.loss_function.knobs == {"beta": 0.2}


def test_a_schedule_ends_with_the_run_or_with_the_prompts_and_is_refused_where_nothing_ends():
    def rates(**facts):
        context = make_context(node="trainer", columns={"prompts": COLUMNS}, **facts)
        runtime = TrainerRuntime(trainer, context, tiny_learner(trainer), None)
        return runtime._making.decay_steps

    trainer = tiny_trainer(schedule="linear")
    assert (rates(steps=7, prompt_steps=9), rates(prompt_steps=9)) == (7, 9)
    with pytest.raises(
        GraphError, match=r"schedule='linear', but nothing says when it ends.*decay_steps"
    ):
        rates()
    trainer = tiny_trainer(schedule="linear", decay_steps=3)
    assert rates(steps=7) == 3
