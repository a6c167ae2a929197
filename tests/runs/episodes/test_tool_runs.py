"""Runs of episodes with tools: what fails is told or is no reward, state is kept, all is given back
whatever dies.
"""

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from rigs.machine import alive, wait_until
from rigs.ranks import processes_of
from rigs.striking import Striking

from dataflow import Graph, Model, collect, run, scorer
from dataflow.folder.run_folder import RunFolder
from dataflow.limits import Limits, Patience
from operators import Evaluate, Generator, Prompts, Trainer, episode, tool_use
from operators.chat.tool_calls import TextCalls
from operators.credit import advantage
from operators.episodes.chat import Reply
from operators.episodes.declaration import Episode
from operators.losses import aipo
from operators.sandbox import fault
from operators.tools import Sandbox

pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(240)]
needs_sandbox = pytest.mark.skipif(fault() is not None, reason=str(fault()))
CALLS = TextCalls(begin="[", end="]", result="{}")
FORMAT = CALLS.format()


def service(how: str) -> str:
    """Fails in some way.

    Args:
        how: In which.
    """
    match how:
        case "raise":
            raise ValueError("nothing there")
        case "hang":
            time.sleep(60)
        case "much":
            return "x" * (10 << 20)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "gone":
            from dataflow import WorldFailed

            raise WorldFailed("the service is gone")
    return "fine"


KINDS = ["fine", "raise", "hang", "much", "kill", "gone"]
TOLD = {
    "fine": "fine",
    "raise": "error: nothing there",
    "hang": "error: 'service' took more than 3 s",
    "much": "x" * 20 + f"\n[cut: {10 << 20} characters in all]",
}


@episode(
    tools=[service], calls=CALLS, call_s=3.0, call_characters=20, timeout_s=60.0, concurrency=16
)
async def used(chat: Any, answer: str) -> str:
    """The policy of these tests is random: what it says is replaced by a call."""
    await chat.say(max_tokens=4)
    try:
        (result,) = await chat.call(Reply("", FORMAT.read(f"[service(how='{answer}')]")))
    except Exception:  # which does not make a result of a tool that is none
        return "caught"
    await chat.say(max_tokens=4)
    return str(result)


def rows(count: int = 40) -> list[dict[str, str]]:
    return [
        {"prompt": f"{chr(97 + n % 26)}{n}=", "answer": KINDS[n % len(KINDS)]} for n in range(count)
    ]


def test_what_a_tool_fails_in_is_told_and_a_tool_that_dies_is_no_reward(policy: Path) -> None:
    g = Graph("used")
    generator = Generator(Model(str(policy)).frozen(), group_size=2, max_tokens=4, slots=8)
    asked = Prompts(rows(6), columns=("answer",), epochs=1)
    found = collect(used(generator, g.source(asked)), rows=12).to_pylist()
    assert len(found) == 12
    for row in found:
        if row["answer"] in TOLD:
            assert row["error"] is None and row["used"] == TOLD[row["answer"]]
            assert TOLD[row["answer"]] in row["completion"], "the policy heard it"
        else:
            assert row["used"] is None and row["finish_reason"] == "error"
            cause = {"kill": "died", "gone": "world"}[row["answer"]]
            assert row["error"].startswith(f"used: {cause}: "), row["error"]


# A sandbox for each rollout


BOX = Sandbox(at_once=4, ahead=1)


@episode(tools=[BOX], calls=CALLS, max_turns=4, processes=2, timeout_s=60.0)
async def boxed(chat: Any, answer: str) -> float:
    """Counts its turns in a sandbox: another rollout's would be another number."""
    box = None
    for turn in range(3):
        await chat.say(max_tokens=4)
        if box is None:
            box = await chat.session(BOX)
            await box.write("start", b"0")
        code = "n = int(open('start').read()) + 1\nopen('start', 'w').write(str(n))\nn"
        call = FORMAT.read(f"[python(code={code!r})]")
        (result,) = await chat.call(Reply("", call))
        assert result == str(turn + 1), result
        chat.reward(1.0)
    return float(await box.read("start"))


@scorer(isolate=False)
def reward(boxed: float) -> float:
    return boxed


def graph(policy: Path, function: Episode = boxed) -> Graph:
    g, model = Graph("boxes"), Model(str(policy))
    generator = Generator(model, group_size=2, max_tokens=4, slots=16, segment_tokens=2)
    trainer = Trainer(
        model, loss=partial(aipo, rho=4.0), prompts_per_step=4, lr=1e-2, checkpoint_every=1
    )
    prompts = Prompts(rows(), columns=("answer",), epochs=None)
    held_out = Prompts(rows(4), columns=("answer",), name="held_out", group_size=1)
    trainer(advantage(reward(function(generator, g.source(prompts)))))
    Evaluate(every_steps=4)(reward(function(generator, g.source(held_out))))
    g.feedback(trainer.weights, generator, max_staleness=1)
    return g


@needs_sandbox
@pytest.mark.usefixtures("machine")
def test_a_sandbox_is_of_one_rollout_and_all_are_given_back(policy: Path, tmp_path: Path) -> None:
    result = run(graph(policy), steps=3, runs=tmp_path, quiet=True)
    assert result.verdict.clean, result.verdict.line
    table = RunFolder.open(result.folder).rollouts_of().read(3)
    assert set(table.column("boxed").to_pylist()) == {3.0}
    assert not pc.any(pc.is_valid(table.column("error"))).as_py()


class StrikingWorlds(Striking):
    """Kills also what is no worker of its own: the processes in which functions run, of which there
    is no record.
    """

    def strike(self, pid: int) -> None:
        if pid in processes_of("boxed")[1:]:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not alive([pid]), 30.0)
        else:
            super().strike(pid)


@needs_sandbox
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("machine")
def test_a_run_whose_processes_are_killed_is_clean_and_gives_every_sandbox_back(
    policy: Path, tmp_path: Path
) -> None:
    """The processes in which functions run, the server that forks them, and workers, one after the
    other.
    """
    limits = Limits(stop_s=2.0, patience=Patience(first_s=0.05, of_one=3))
    victims = [
        ("boxed", 2),
        ("boxed", 0),
        ("generator", 0),
        ("boxed", 3),
        ("boxed", 1),
        ("boxed", 0),
        ("trainer", 0),
    ]
    striking = StrikingWorlds(tmp_path, {"boxed": 4, "generator": 1, "trainer": 1}, victims)
    striking.start()
    steps = 20
    result = run(graph(policy), steps=steps, runs=tmp_path, quiet=True, limits=limits)
    striking.join(1.0)
    assert striking.error is None and striking.struck == victims
    assert result.verdict.clean, result.verdict.line
    assert f"{steps * 4} trained + 0 dropped" in result.verdict.line
    assert not list((result.folder / "finished").rglob("*.turns"))


# The chat template's own calls


TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{% if"
    " m.role == 'tool' %}r={{ m.content }}-{% else %}{{ m.role[0] }}={{ m.content }}{% for c in"
    ' m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{'
    " c.function.arguments | tojson }}}</tool_call>{% endfor %}{% if m.role == 'assistant'"
    " %}<eos>{% endif %}-{% endif %}{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789= .-_<>/\"{}:,'"


def double(number: int) -> int:
    """Doubles a number.

    Args:
        number: It.
    """
    return 2 * number


@pytest.mark.slow
def test_calls_and_results_stand_as_the_chat_template_has_them(tmp_path: Path) -> None:
    """A policy that was shown one conversation: it calls, hears the result, and says it."""
    from transformers import AutoTokenizer

    from operators.warm_start import warm_start

    call = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'
    first, second = "double u=21-a=", f"double u=21-a={call}<eos>-r=42-a="
    folder = warm_start(
        tmp_path / "policy",
        examples=[(first, call), (second, "42")] * 64,
        alphabet=ALPHABET,
        layers=2,
        width=64,
        heads=2,
        steps=150,
        seed=0,
        learning_rate=3e-3,
        max_positions=192,
    )
    chatty = tmp_path / "chatty"
    shutil.copytree(folder, chatty)
    tokenizer = AutoTokenizer.from_pretrained(chatty)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(chatty)
    g = Graph("calls")
    generator = Generator(
        Model(str(chatty)).frozen(), group_size=2, max_tokens=80, chat=True, temperature=0.0
    )
    asked = Prompts([{"prompt": "21"}], epochs=1, chat=True)
    made = tool_use([double], name="said", max_turns=3)
    found = collect(made(generator, g.source(asked)), rows=2).to_pylist()
    for row in found:
        assert row["error"] is None and row["said"] == "42", row
        assert tokenizer.decode(row["tokens"]).replace(" ", "") == (second + "42<eos>").replace(
            " ", ""
        )
        said = [token for token, chosen in zip(row["tokens"], row["mask"], strict=True) if chosen]
        assert tokenizer.decode(said).replace(" ", "") == f"{call}<eos>42<eos>".replace(" ", "")
