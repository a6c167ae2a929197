"""Runs of episodes: tokens as they were sampled, worlds that fail, workers that die; the ledger is
clean every time.
"""

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from episode_rig import (
    LIMITS,
    STEPS,
    TURNS,
    episode_graph,
    goes_on_after_a_kill,
    goes_on_turn_by_turn,
    nothing_is_left,
    rollouts,
    rows,
)
from rigs.graphs import losses
from rigs.policy import CHAT_TEMPLATE
from rigs.striking import Striking

from dataflow import Graph, Model, collect, inline, run, scorer
from dataflow.errors import GraphError
from operators import Evaluate, Generator, Prompts, Trainer, episode
from operators.credit import advantage, conversation_advantage
from operators.episodes.declaration import Episode
from operators.episodes.runtime import EpisodesRuntime
from operators.losses import aipo

pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(180)]


@episode(max_turns=TURNS)
async def talk(chat: Any, answer: str) -> float:
    """As many turns as the prompt says, of which the world repeats the first letter."""
    good = 0
    for _ in range(int(answer)):
        said = await chat.say(max_tokens=4)
        good += said[:1] in "abcdefghijklm"
        chat.hear(f"{answer}{said[:1]}=")
        chat.reward(1.0)
    return float(good)


@scorer(isolate=False)
def reward(talk: float) -> float:
    return talk


def graph(policy: Path, function: Episode = talk, **knobs: Any) -> Graph:
    return episode_graph(policy, function, reward, **knobs)


# What a rollout is


def test_what_was_sampled_is_trained_to_the_id_with_the_logprobs_of_a_full_forward_pass(
    policy: Path,
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(policy),
        AutoTokenizer.from_pretrained(policy),
    )
    g = Graph("exact")
    generator = Generator(Model(str(policy)).frozen(), group_size=2, max_tokens=8, slots=16)
    found = collect(
        talk(generator, g.source(Prompts(rows(12), columns=("answer",)))), rows=24
    ).to_pylist()
    assert len(found) == 24
    for row in found:
        tokens, mask, turns = (np.array(row[name]) for name in ("tokens", "mask", "turn"))
        assert (mask == (turns >= 0)).all() and set(turns[mask]) == set(range(int(row["answer"])))
        assert (
            tokens[: len(tokenizer(row["prompt"])["input_ids"])].tolist()
            == tokenizer(row["prompt"])["input_ids"]
        )
        for turn in range(int(row["answer"])):
            at = np.flatnonzero(turns == turn)
            assert (np.diff(at) == 1).all()
            end = at[-1] + 1
            following = (
                tokens[end : np.flatnonzero(turns == turn + 1)[0]]
                if turn + 1 < int(row["answer"])
                else []
            )
            if len(following):  # what the world made of what it heard
                said = tokenizer.decode(tokens[at], skip_special_tokens=True)
                heard = tokenizer(f"{row['answer']}{said[:1]}=", add_special_tokens=False)[
                    "input_ids"
                ]
                assert list(following) == heard
            assert row["turn_reward"][at[-1]] == 1.0
        with torch.no_grad():
            logits = model(torch.tensor([row["tokens"]])).logits[0]
        logprobs = torch.log_softmax(logits.float(), -1)[:-1].gather(
            1, torch.tensor(row["tokens"][1:])[:, None]
        )[:, 0]
        recorded = np.array(row["logprobs"], np.float32)
        assert np.allclose(recorded[1:][mask[1:]], logprobs.numpy()[mask[1:]], atol=1e-4)
        assert not recorded[~mask].any()
        assert (np.array(row["versions"])[~mask] == -1).all() and (
            np.array(row["versions"])[mask] == 0
        ).all()
        assert row["finish_reason"] == "stop" and row["error"] is None


def test_what_the_world_says_in_a_chat_stands_between_the_templates_delimiters(
    policy: Path, tmp_path: Path
) -> None:
    """And the policy's ids are those that were sampled, whether it ended its turn itself or had to
    stop.
    """
    chatty, tokenizer = chatty_policy(policy, tmp_path)
    g = Graph("chat")
    generator = Generator(
        Model(str(chatty)).frozen(), group_size=4, max_tokens=8, slots=16, chat=True
    )
    asked = Prompts(
        [{"prompt": f"hi {n}", "answer": "3"} for n in range(8)],
        columns=("answer",),
        epochs=1,
        chat=True,
    )
    found = collect(talk(generator, g.source(asked)), rows=32).to_pylist()
    ended = set()
    for row in found:
        assert row["error"] is None and row["finish_reason"] == "stop"
        tokens, turns = np.array(row["tokens"]), np.array(row["turn"])
        said = [tokens[turns == turn] for turn in range(3)]
        begin = int(np.flatnonzero(turns == 0)[0])
        assert tokenizer.decode(tokens[:begin]).replace(
            " ", ""
        ) == f"u={json.loads(row['prompt'])[0]['content']}-a=".replace(" ", "")
        for turn in range(2):
            between = tokens[
                np.flatnonzero(turns == turn)[-1] + 1 : np.flatnonzero(turns == turn + 1)[0]
            ]
            is_ended = bool(said[turn][-1] == tokenizer.eos_token_id)
            ended.add(is_ended)
            text = tokenizer.decode(said[turn], skip_special_tokens=True)
            closing = "-" if is_ended else "<eos>-"
            expected = f"{closing}u=3{text[:1]}=-a="
            assert between.tolist() == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert False in ended


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            "has no delimiters .* it ends a turn with ''",
        ),
        (
            None,
            "neither tokenizer_config.json nor chat_template.jinja in .* has a chat template; give",
        ),
    ],
    ids=["no delimiters", "none"],
)
def test_a_chat_template_that_no_conversation_can_be_made_with_is_refused_before_anything_starts(
    policy: Path, tmp_path: Path, template: str | None, why: str
) -> None:
    chatty = tmp_path / "chatty"
    shutil.copytree(policy, chatty)
    if template is not None:
        (chatty / "chat_template.jinja").write_text(template)
    g = Graph("chat")
    generator = Generator(
        Model(str(chatty)).frozen(), group_size=4, max_tokens=8, slots=16, chat=True
    )
    Evaluate(of="talk")(talk(generator, g.source(Prompts(rows(8), columns=("answer",), chat=True))))
    with pytest.raises(GraphError, match=why):
        run(g, runs=tmp_path / "runs", quiet=True)
    assert not (tmp_path / "runs").exists()


@episode(max_turns=5)
async def forgetful(chat: Any, answer: str) -> float:
    """Forgets all but its last turn, twice, and has what it said summed up before its last turn."""
    said = [await chat.say(max_tokens=4)]
    for _ in range(3):
        chat.hear(f"{said[-1][:1]}=")
        if len(said) > 1:
            chat.keep_last(1)
        said.append(await chat.say(max_tokens=4))
    chat.rewrite(f"{answer}{said[0][:2]}=")
    await chat.say(max_tokens=4)
    return 1.0


def exact(row: dict[str, Any], model: Any, turns: int) -> None:
    """All that was sampled is chosen once, with the log-probabilities of a forward pass over its
    training row.
    """
    import torch

    tokens, mask, numbers, rows = (
        np.array(row[name]) for name in ("tokens", "mask", "turn", "training_row")
    )
    assert (mask == (numbers >= 0)).all() and sorted(set(numbers[mask].tolist())) == list(
        range(turns)
    )
    recorded = np.array(row["logprobs"], np.float32)
    for number in range(rows.max() + 1):
        at = np.flatnonzero(rows == number)
        assert (np.diff(at) == 1).all() and mask[at].any() and not mask[at[0]]
        ids = torch.tensor(tokens[at])
        with torch.no_grad():
            logits = model(ids[None]).logits[0].float()
        found = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None].long())[:, 0].numpy()
        chosen = mask[at][1:]
        assert np.allclose(recorded[at][1:][chosen], found[chosen], atol=1e-4)
    assert not recorded[~mask].any()


def test_what_was_sampled_in_a_rewritten_conversation_is_trained_once_as_the_policy_saw_it(
    policy: Path,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(policy),
        AutoTokenizer.from_pretrained(policy),
    )
    g = Graph("rewritten")
    generator = Generator(Model(str(policy)).frozen(), group_size=2, max_tokens=8, slots=16)
    found = collect(
        forgetful(generator, g.source(Prompts(rows(12), columns=("answer",)))), rows=24
    ).to_pylist()
    for row in found:
        assert row["error"] is None and row["finish_reason"] == "stop"
        exact(row, model, turns=5)
        tokens, turns, numbers = (
            np.array(row[name]) for name in ("tokens", "turn", "training_row")
        )
        assert numbers.max() == 3 and [set(turns[numbers == at]) - {-1} for at in range(4)] == [
            {0, 1},
            {2},
            {3},
            {4},
        ]
        prompt = tokenizer(row["prompt"])["input_ids"]
        said = [tokens[turns == turn] for turn in range(5)]
        # the prompt, the last turn as it was sampled, and what was heard behind it
        for at in (1, 2):
            row_tokens, row_turns = tokens[numbers == at], turns[numbers == at]
            before = row_tokens[: np.flatnonzero(row_turns >= 0)[0]]
            heard = tokenizer(
                f"{tokenizer.decode(said[at], skip_special_tokens=True)[:1]}=",
                add_special_tokens=False,
            )
            assert before.tolist() == [*prompt, *said[at], *heard["input_ids"]]
        whole = f"{row['answer']}{tokenizer.decode(said[0], skip_special_tokens=True)[:2]}="
        last = tokens[numbers == 3][: -len(said[4])]
        assert last.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("past", ["sampled", "rendered"])
def test_a_rewritten_chat_is_trained_to_the_id_with_the_logprobs_of_full_forward_passes(
    past: str, policy: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    chatty, _ = chatty_policy(policy, tmp_path)
    g, model = Graph("rewritten"), AutoModelForCausalLM.from_pretrained(policy)
    generator = Generator(
        Model(str(chatty)).frozen(), group_size=4, max_tokens=8, slots=16, chat=True
    )
    asked = Prompts(
        [{"prompt": f"hi {n}", "answer": "3"} for n in range(8)],
        columns=("answer",),
        epochs=1,
        chat=True,
    )
    made = dataclasses.replace(forgetful, past=past)(generator, g.source(asked))  # type: ignore[type-var]
    found = collect(made, rows=32).to_pylist()
    assert {row["error"] for row in found} == {None}
    for row in found:
        exact(row, model, turns=5)
        assert max(row["training_row"]) >= 3


def chatty_policy(policy: Path, tmp_path: Path) -> tuple[Path, Any]:
    """The policy with a chat template."""
    from transformers import AutoTokenizer

    chatty = tmp_path / "chatty"
    shutil.copytree(policy, chatty)
    tokenizer = AutoTokenizer.from_pretrained(chatty)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(chatty)
    return chatty, tokenizer


@episode(max_turns=9)
async def crowded(chat: Any) -> float:
    """Speaks until the context is full, and then goes on with its last turn alone, once."""
    from operators.episodes.chat import EpisodeOver

    cuts = 0
    while chat.turns < 9:
        try:
            chat.hear("a" * len(await chat.say(max_tokens=12)))
        except EpisodeOver:
            chat.keep_last(0)
            cuts += 1
    return float(cuts)


@pytest.mark.slow
def test_an_episode_whose_context_is_full_goes_on_with_what_it_keeps(policy: Path) -> None:
    g = Graph("crowded")
    generator = Generator(Model(str(policy)).frozen(), group_size=1, max_tokens=12, slots=8)
    found = collect(crowded(generator, g.source(Prompts(rows(4)))), rows=4).to_pylist()
    assert {(row["finish_reason"], row["error"], max(row["turn"])) for row in found} == {
        ("stop", None, 8)
    }
    assert any(row["crowded"] for row in found)
    for row in found:
        lengths = np.bincount(row["training_row"])
        assert lengths.max() <= 64 and len(lengths) == row["crowded"] + 1


@episode(max_turns=8)
async def game(chat: Any, answer: str, prompt: str) -> float:
    """Two players in turn, and two tries behind a first word."""
    await chat.say(max_tokens=3)
    for branch in chat.branch(2):
        branch.hear("or ")
        said = await branch.say(max_tokens=3)
        branch.reward(float(len(said)))
    white, black = chat.agent("white", f"{prompt}w="), chat.agent("black", f"{prompt}b=")
    for _ in range(2):
        black.hear(await white.say(max_tokens=3))
        white.hear(await black.say(max_tokens=3))
    white.reward(float(answer))
    black.reward(-float(answer))
    return float(white.turns)


def test_agents_and_branches_of_an_episode_are_trained_to_the_id_each_behind_what_it_saw(
    policy: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy)
    g = Graph("game")
    generator = Generator(Model(str(policy)).frozen(), group_size=4, max_tokens=8, slots=16)
    made = conversation_advantage(
        game(generator, g.source(Prompts(rows(4), columns=("answer",), epochs=1)))
    )
    found = collect(made, rows=16).to_pylist()
    for row in found:
        assert (row["error"], row["finish_reason"], row["game"]) == (None, "stop", 2.0)
        exact(row, model, turns=7)
        assert row["row_conversation"] == [0, 1, 2, 3, 4]
        assert row["row_role"] == ["", "", "", "white", "black"] and row["row_branch_turn"] == [
            -1,
            0,
            0,
            -1,
            -1,
        ]
        chosen, numbers = np.array(row["mask"]), np.array(row["training_row"])
        advantages = np.array(row["advantage"])
        assert not advantages[~chosen].any() and len({*advantages[chosen & (numbers == 1)]}) == 1
        assert sum(
            advantages[np.flatnonzero(chosen & (numbers == at))[0]] for at in (1, 2)
        ) == pytest.approx(0.0)


@pytest.mark.slow
def test_a_run_of_episodes_with_several_conversations_is_clean(
    policy: Path, tmp_path: Path
) -> None:
    g, model = Graph("game"), Model(str(policy))
    generator = Generator(model, group_size=2, max_tokens=8, slots=16, segment_tokens=2)
    trainer = Trainer(model, loss=aipo, prompts_per_step=2, lr=1e-2, normalize="rollout_means")
    trainer(
        conversation_advantage(
            game(generator, g.source(Prompts(rows(16), columns=("answer",), epochs=None)))
        )
    )
    g.feedback(trainer.weights, generator, max_staleness=1)
    result = run(g, steps=2, runs=tmp_path, quiet=True)
    assert result.verdict.clean, result.verdict.line
    assert len(losses(result.folder)) == 2 and all(np.isfinite(losses(result.folder)))
    nothing_is_left(result)


@episode(max_turns=2, isolate=False)
async def endless(chat: Any) -> float:
    while True:
        chat.hear("a" * len(await chat.say()))


def test_an_episode_whose_turns_are_used_up_is_over_and_has_no_value(policy: Path) -> None:
    g = Graph("over")
    generator = Generator(Model(str(policy)).frozen(), group_size=1, max_tokens=4, slots=8)
    found = collect(endless(generator, g.source(Prompts(rows(4)))), rows=4).to_pylist()
    assert {
        (row["finish_reason"], row["error"], row["endless"], max(row["turn"])) for row in found
    } == {("length", None, None, 1)}


def test_an_episode_that_fills_the_context_is_over(policy: Path) -> None:
    g, whole = Graph("full"), dataclasses.replace(endless, max_turns=1000)
    generator = Generator(Model(str(policy)).frozen(), group_size=1, max_tokens=30, slots=8)
    found = collect(whole(generator, g.source(Prompts(rows(2)))), rows=2).to_pylist()
    assert {(row["finish_reason"], row["error"]) for row in found} == {("length", None)}
    assert all(len(row["tokens"]) <= 64 for row in found)


# Whole runs


@pytest.mark.slow
def test_inline_runs_with_one_seed_are_equal_wherever_the_world_runs(
    policy: Path, tmp_path: Path
) -> None:
    here = graph(policy, dataclasses.replace(talk, isolate=False))
    one = run(here, steps=STEPS, on=inline(), runs=tmp_path, quiet=True)
    other = run(graph(policy), steps=STEPS, on=inline(), runs=tmp_path, quiet=True)
    assert one.verdict.clean and other.verdict.clean, other.verdict.line
    assert losses(one.folder) == losses(other.folder) and len(set(losses(one.folder))) == STEPS
    assert rollouts(one).equals(rollouts(other))
    nothing_is_left(one)


def test_a_run_of_processes_trains_every_group_once_and_none_beyond_the_bound(
    policy: Path, tmp_path: Path
) -> None:
    result = run(graph(policy, max_staleness=1), steps=STEPS, runs=tmp_path, quiet=True)
    assert result.verdict.clean, result.verdict.line
    assert (
        f"{STEPS * 4} trained + 0 dropped" in result.verdict.line
        and "max staleness 1 of 1" in result.verdict.line
    )
    rounds = [line["eval_n"] for line in result.metrics if "eval_n" in line]
    assert set(rounds) == {6} and 2 <= len(rounds) <= 3, (
        "one that is due while another is under way may give way"
    )
    assert not pc.any(pc.is_valid(rollouts(result).column("error"))).as_py()
    nothing_is_left(result)


@scorer(isolate=False)
def length(completion: str) -> float:
    return float(len(completion))


@pytest.mark.slow
def test_replicas_of_a_generator_answer_turns_beside_plain_prompts_until_these_end(
    policy: Path, tmp_path: Path
) -> None:
    g, model = Graph("mixed"), Model(str(policy))
    generator = Generator(model, group_size=2, max_tokens=8, slots=16, segment_tokens=2)
    trainer = Trainer(model, loss=aipo, prompts_per_step=4, lr=1e-2)
    trainer(
        advantage(
            reward(talk(generator, g.source(Prompts(rows(16), columns=("answer",), epochs=1))))
        )
    )
    plain = Prompts(rows(4), name="plain", group_size=1)
    Evaluate(every_steps=4, of="length")(length(generator(g.source(plain))))
    g.feedback(trainer.weights, generator, max_staleness=1)
    result = run(g, runs=tmp_path, quiet=True, replicas={"generator": 2})
    assert result.verdict.clean and "16 groups issued = 16 trained" in result.verdict.line, (
        result.verdict.line
    )
    assert [line["eval_n"] for line in result.metrics if "eval_n" in line] == [4, 4]
    nothing_is_left(result)


# Worlds that fail


@episode(max_turns=TURNS, timeout_s=4.0, concurrency=64)
async def unruly(chat: Any, answer: str, prompt: str) -> float:
    """In one prompt of five something goes wrong after the first turn."""
    await chat.say(max_tokens=4)
    match int(prompt[1:-1]) % 10:
        case 1:
            raise ValueError("the world is broken")
        case 3:
            await asyncio.sleep(60)
        case 5:
            chat.hear("a" * (10 << 20))
        case 7:
            os.kill(os.getpid(), signal.SIGKILL)
    return float(answer)


@scorer(isolate=False, name="reward")
def worth(unruly: float) -> float:
    return unruly


def test_a_world_that_fails_is_an_error_of_its_rollouts_and_no_reward(policy: Path) -> None:
    g = Graph("unruly")
    generator = Generator(Model(str(policy)).frozen(), group_size=2, max_tokens=4, slots=8)
    made = unruly(generator, g.source(Prompts(rows(10), columns=("answer",))))
    found = collect(advantage(worth(made)), rows=20).to_pylist()
    assert len(found) == 20
    words = {
        1: "ValueError: the world is broken",
        3: "no answer within 4 s",
        5: "too much between two turns",
        7: "ended with signal 9",
    }
    for row in found:
        wrong = words.get(int(row["prompt"][1:-1]) % 10)
        assert (row["error"] is None) == (wrong is None), row["error"]
        if wrong is not None:
            assert wrong in row["error"] and row["error"].startswith("unruly: "), row["error"]
            assert (
                row["finish_reason"] == "error"
                and row["unruly"] is None
                and row["advantage"] is None
            )
        else:
            assert row["advantage"] == 0.0, "siblings did alike, and failures are none of them"


@episode(max_turns=TURNS, tries=3)
async def moody(chat: Any, prompt: str, folder: str = "") -> float:
    """Fails twice, after turns that are told again."""
    first = await chat.say(max_tokens=4)
    chat.hear(first[:1])
    await chat.say(max_tokens=4)
    mark = Path(folder) / f"{prompt}{first.encode().hex()}"
    with mark.open("a") as file:
        file.write(".")
    if len(mark.read_text()) < 3:
        raise OSError("no answer from the world")
    return 1.0


def test_an_episode_whose_world_fails_is_tried_again(policy: Path, tmp_path: Path) -> None:
    g = Graph("moody")
    generator = Generator(Model(str(policy)).frozen(), group_size=1, max_tokens=4, slots=8)
    found = collect(
        moody(generator, g.source(Prompts(rows(4), epochs=1)), folder=str(tmp_path)), rows=4
    ).to_pylist()
    assert [(row["error"], row["moody"], max(row["turn"])) for row in found] == [(None, 1.0, 1)] * 4
    assert [mark.read_text() for mark in tmp_path.iterdir()] == ["..."] * 4
    twice = dataclasses.replace(moody, tries=2)
    other = tmp_path / "other"
    other.mkdir()
    g = Graph("moodier")
    found = collect(
        twice(generator, g.source(Prompts(rows(1), epochs=1)), folder=str(other)), rows=1
    ).to_pylist()
    assert "no answer from the world" in found[0]["error"] and found[0]["moody"] is None


# Workers that die


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim", ["talk", "generator", pytest.param("trainer", marks=pytest.mark.slow)]
)
def test_a_run_whose_worker_is_killed_goes_on_and_is_clean(
    victim: str, policy: Path, tmp_path: Path
) -> None:
    goes_on_after_a_kill(graph(policy), victim, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_whose_workers_are_killed_one_after_the_other_is_clean(
    policy: Path, tmp_path: Path
) -> None:
    """The episode's processes are three: its worker, the server of its pool, and one in which
    functions run.
    """
    sizes, steps = {"talk": 3, "generator": 1, "trainer": 1}, 24
    victims = [("talk", 0), ("generator", 0), ("trainer", 0), ("talk", 0), ("generator", 0)]
    striking = Striking(tmp_path, sizes, victims)
    striking.start()
    result = run(graph(policy, eval_every=8), steps=steps, runs=tmp_path, quiet=True, limits=LIMITS)
    striking.join(1.0)
    assert striking.error is None and striking.struck == victims
    assert result.verdict.clean, result.verdict.line
    assert f"{steps * 4} trained + 0 dropped" in result.verdict.line
    assert not pc.any(pc.is_valid(rollouts(result).column("error"))).as_py()
    nothing_is_left(result)


def test_a_run_that_is_cut_off_goes_on_turn_by_turn(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = dataclasses.replace(talk, isolate=False)
    goes_on_turn_by_turn(
        lambda: graph(policy, function, max_staleness=0, eval_every=100),
        EpisodesRuntime,
        tmp_path,
        monkeypatch,
    )


@pytest.mark.slow
def test_a_thousand_episodes_wait_at_once_and_none_for_another(policy: Path) -> None:
    """The worlds of all of them together take as long as one of them."""

    @episode(max_turns=1, concurrency=1000, timeout_s=60.0)
    async def waits(chat: Any, answer: str) -> float:
        await chat.say(max_tokens=2)
        began = time.monotonic()
        await asyncio.sleep(1.0)
        return time.monotonic() - began

    g = Graph("many")
    generator = Generator(Model(str(policy)).frozen(), group_size=10, max_tokens=2, slots=256)
    found = collect(waits(generator, g.source(Prompts(rows(100), columns=("answer",)))), rows=1000)
    assert found.num_rows == 1000 and found.column("error").null_count == 1000
