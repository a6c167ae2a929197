"""Runs of agents: programs that nobody rewrote, whose calls are turns; what goes wrong there is no
reward.
"""

import json
import secrets
import shutil
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pyarrow.compute as pc
import pytest
from episode_rig import (
    STEPS,
    episode_graph,
    goes_on_after_a_kill,
    goes_on_turn_by_turn,
    nothing_is_left,
    rollouts,
    rows,
)
from rigs.policy import CHAT_TEMPLATE
from serving_rig import TOOLED, byte_tokenizer, tiny_llama

from dataflow import DataflowError, Graph, Model, collect, run, scorer
from operators import Endpoint, Generator, Prompts, agent
from operators.agents.runtime import AgentsRuntime
from operators.models.loading import load_tokenizer

pytestmark = [pytest.mark.usefixtures("forked", "one_core"), pytest.mark.timeout(180)]

SCRIPT = Path(__file__).with_name("agent_of_urllib.py")
FORCED = {"required": '<tool_call>\n{"name": "', "add": '<tool_call>\n{"name": "add", "arguments":'}
"""What a turn is made to begin with, by how the program forces a call."""
COMMAND = f"python {SCRIPT}"
SHARED = ("json", "urllib.request", "threading", "subprocess")
"""Imports of the program, which its starts share."""
talker = agent(
    COMMAND, name="talker", columns=("answer",), returns=str, imports=SHARED, concurrency=8
)


@pytest.fixture(scope="module")
def chatty(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy with a chat template."""
    folder = tmp_path_factory.mktemp("agents") / "chatty"
    shutil.copytree(policy, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@scorer(isolate=False)
def reward(talker: str, completion: str) -> float:
    return sum(letter in "abcdefghijklm" for letter in completion) / (
        1 + len(completion)
    ) + 0.0 * len(talker)


def graph(policy: Path, **knobs: Any) -> Graph:
    return episode_graph(policy, talker, reward, name="agents", **knobs)


def programs(mark: str) -> list[int]:
    """Processes that inherited this mark, but for this one and its forks that are workers."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            is_ours = process.environ().get("AGENT_RUN_TEST") == mark
        except psutil.Error:
            continue
        if is_ours and ("program_host.py" in words or SCRIPT.name in words or "sleep 987" in words):
            found.append(process.pid)
    return found


@pytest.fixture(autouse=True)
def no_program_is_left(monkeypatch: pytest.MonkeyPatch) -> Any:
    mark = secrets.token_hex(8)
    monkeypatch.setenv("AGENT_RUN_TEST", mark)
    yield
    assert not programs(mark), "all programs end with their run"


# What a rollout is


@pytest.mark.parametrize("imports", [(), pytest.param(SHARED, marks=pytest.mark.slow)])
def test_what_a_program_was_answered_is_trained_to_the_id(
    chatty: Path, imports: tuple[str, ...]
) -> None:
    """Ids and log-probabilities of the rows are those that the program saw; its prompts are the
    context.
    """
    g = Graph("exact")
    generator = Generator(Model(str(chatty)).frozen(), group_size=2, max_tokens=8, slots=16)
    asks = agent(
        COMMAND, name="talker", columns=("answer",), returns=str, imports=imports, concurrency=4
    )
    made = asks(Endpoint(generator), g.source(Prompts(rows(6), columns=("answer",))))
    found = collect(made, rows=12).to_pylist()
    assert len(found) == 12
    for row in found:
        assert row["error"] is None and row["finish_reason"] == "stop", row["error"]
        seen = json.loads(row["talker"])
        tokens, mask, turns, logprobs = (
            np.array(row[name]) for name in ("tokens", "mask", "turn", "logprobs")
        )
        assert len(seen) == int(row["answer"]) and (mask == (turns >= 0)).all()
        for turn, (prompt, ids, own) in enumerate(seen):
            at = np.flatnonzero(turns == turn)
            assert tokens[at].tolist() == ids and tokens[: at[0]].tolist() == prompt
            assert np.allclose(logprobs[at], own, atol=1e-6)
        assert len(tokens) == len(seen[-1][0]) + len(seen[-1][1]), "what came last is the policy's"
        assert (np.array(row["versions"])[mask] == 0).all()


def test_calls_that_a_program_forces_begin_with_context_and_the_rest_is_trained_to_the_id(
    tmp_path: Path,
) -> None:
    """What the policy of a run is made to begin a call with stands in the prompt of that turn, and
    in no mask.
    """
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOLED
    tiny_llama(len(tokenizer), context=2048).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    g = Graph("forced")
    generator = Generator(Model(str(tmp_path)).frozen(), group_size=1, max_tokens=8, slots=8)
    tasks = [{"prompt": "hello", "answer": does} for does in FORCED]
    forces = agent(
        COMMAND, name="talker", columns=("answer",), returns=str, imports=SHARED, concurrency=4
    )
    found = collect(
        forces(generator, g.source(Prompts(tasks, columns=("answer",), epochs=1))), rows=2
    ).to_pylist()
    for row in found:
        assert row["error"] is None, row["error"]
        seen, opening = json.loads(row["talker"]), tokenizer(FORCED[row["answer"]])["input_ids"]
        tokens, mask, turns = (np.array(row[name]) for name in ("tokens", "mask", "turn"))
        assert (mask == (turns >= 0)).all() and mask.sum() == sum(len(ids) for _, ids, _ in seen)
        for turn, (prompt, ids, _) in enumerate(seen):
            at = np.flatnonzero(turns == turn)
            assert prompt[-len(opening) :] == opening and tokens[: at[0]].tolist() == prompt
            assert tokens[at].tolist() == ids
        assert set(row["training_row"]) == {0}, (
            "each turn goes on with what was forced and drawn before"
        )


def test_a_program_whose_turns_are_used_up_is_over_and_its_failure_is_the_length(
    chatty: Path,
) -> None:
    g = Graph("over")
    generator = Generator(Model(str(chatty)).frozen(), group_size=1, max_tokens=4, slots=8)
    ends = agent(
        COMMAND, name="talker", columns=("answer",), returns=float, imports=SHARED, max_turns=3
    )
    endless = [{"prompt": f"a{n}=", "answer": "endless"} for n in range(2)]
    found = collect(
        ends(generator, g.source(Prompts(endless, columns=("answer",)))), rows=2
    ).to_pylist()
    assert [
        (row["finish_reason"], row["error"], row["talker"], max(row["turn"])) for row in found
    ] == [("length", None, None, 2)] * 2


@pytest.mark.parametrize("does", ["rewrites", "parallel", "again"])
def test_what_goes_on_from_no_call_before_is_a_training_row_of_its_own(
    does: str, chatty: Path
) -> None:
    """A conversation that was rewritten, two calls at once from one past, the same call again: each
    token is trained once, and no call is refused.
    """
    g = Graph("rows")
    generator = Generator(Model(str(chatty)).frozen(), group_size=2, max_tokens=4, slots=8)
    tasks = [{"prompt": f"a{n}=", "answer": does} for n in range(3)]
    several = agent(
        COMMAND, name="talker", columns=("answer",), returns=float, imports=SHARED, concurrency=6
    )
    found = collect(
        several(generator, g.source(Prompts(tasks, columns=("answer",), epochs=1))), rows=6
    ).to_pylist()
    for row in found:
        assert (row["error"], row["finish_reason"]) == (None, "stop"), row["error"]
        mask, turns, parts = (np.array(row[name]) for name in ("mask", "turn", "training_row"))
        said = {"rewrites": [[0], [1]], "parallel": [[0, 1], [2]], "again": [[0], [1]]}[does]
        assert [sorted(set(turns[mask & (parts == part)])) for part in range(2)] == said
        assert parts.max() == 1 and row["talker"] == 1.0


# What programs share, and programs that stay


def test_a_module_that_breaks_when_it_is_imported_ends_the_run_and_is_named(
    chatty: Path, tmp_path: Path
) -> None:
    (tmp_path / "breaks_inside.py").write_text("raise RuntimeError('no licence')\n")
    shutil.copy(SCRIPT, tmp_path)
    g = Graph("broken")
    generator = Generator(Model(str(chatty)).frozen(), group_size=2, max_tokens=4, slots=8)
    shares = agent(
        f"python {tmp_path / SCRIPT.name}",
        name="talker",
        columns=("answer",),
        imports=("breaks_inside",),
    )
    with pytest.raises(
        DataflowError,
        match="'talker'.* imports='breaks_inside' to end with RuntimeError: no licence",
    ):
        collect(
            shares(generator, g.source(Prompts(rows(2), columns=("answer",), epochs=1))), rows=4
        )


class StayingAgent(BaseHTTPRequestHandler):
    """An agent that stays: each call of it is a rollout, with an endpoint and a key of its own."""

    served: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        task = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.served.append(task["key"])
        messages, seen = [{"role": "user", "content": task["prompt"]}], []
        for number in range(int(task["answer"])):
            body = {"model": "any", "messages": messages, "max_tokens": 4, "return_token_ids": True}
            headers = {"Authorization": f"Bearer {task['key']}", "Content-Type": "application/json"}
            asked = urllib.request.Request(
                task["url"] + "/chat/completions", json.dumps(body).encode(), headers
            )
            with urllib.request.urlopen(asked, timeout=50) as answer:
                said = json.load(answer)
            (choice,) = said["choices"]
            seen.append([said["prompt_token_ids"], choice["token_ids"]])
            content = choice["message"]["content"] or ""
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": f"{number}="},
            ]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(seen).encode())

    def log_message(self, *_: Any) -> None:
        """Nothing."""


COURIER = (
    "import json, os, sys, urllib.request\ntask = json.load(sys.stdin) | {'url':"
    " os.environ['OPENAI_BASE_URL'], 'key':"
    " os.environ['OPENAI_API_KEY']}\nprint(urllib.request.urlopen(sys.argv[1],"
    " json.dumps(task).encode(), timeout=60).read().decode())\n"
)


def test_one_process_that_stays_serves_many_rollouts_each_with_a_key_of_its_own(
    chatty: Path, tmp_path: Path
) -> None:
    (tmp_path / "courier.py").write_text(COURIER)
    StayingAgent.served.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), StayingAgent)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        command = f"python {tmp_path / 'courier.py'} http://127.0.0.1:{server.server_address[1]}"
        g = Graph("stays")
        generator = Generator(Model(str(chatty)).frozen(), group_size=2, max_tokens=8, slots=16)
        sent = agent(
            command,
            name="talker",
            columns=("answer",),
            returns=str,
            imports=("json", "urllib.request"),
        )
        made = sent(generator, g.source(Prompts(rows(6), columns=("answer",), epochs=1)))
        found = collect(made, rows=12).to_pylist()
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
    assert len(set(StayingAgent.served)) == len(StayingAgent.served) == 12
    for row in found:
        assert row["error"] is None, row["error"]
        seen = json.loads(row["talker"])
        tokens, mask = np.array(row["tokens"]), np.array(row["mask"])
        assert len(seen) == int(row["answer"])
        assert tokens.tolist() == seen[-1][0] + seen[-1][1]
        assert tokens[mask].tolist() == [token for _, ids in seen for token in ids]


# Programs that fail

WRONG = {
    "raises": "raised: its program ended with status 1: ValueError: the agent is broken",
    "hangs": "hung: no call and no end within 5 s",
    "is unlucky": "world: its program ended with status 75: the judge is away",
    "dies": "died: its program ended by signal 9",
    "shouts": "unusable: it said more than 1024 KB",
    "mumbles": "unusable: the last line of its output returned 'no number'",
    "nests": "unusable: the last line of its output returned '[[[",
    "silent": "unusable: its program ended well and never called",
}


def test_a_program_that_goes_wrong_is_an_error_of_its_rollouts_and_no_reward(chatty: Path) -> None:
    g = Graph("unruly")
    generator = Generator(Model(str(chatty)).frozen(), group_size=2, max_tokens=4, slots=8)
    tasks = [
        {"prompt": f"a{n}=", "answer": does}
        for n, does in enumerate([*WRONG, "strange", "abstains"])
    ]
    unruly = agent(
        COMMAND,
        name="talker",
        columns=("answer",),
        returns=float,
        imports=SHARED,
        timeout_s=5.0,
        concurrency=6,
    )
    found = collect(
        unruly(generator, g.source(Prompts(tasks, columns=("answer",), epochs=1))), rows=18
    ).to_pylist()
    assert len(found) == 18
    for row in found:
        if row["answer"] == "strange":
            assert (row["error"], row["talker"]) == (None, 401.0), "the key of nobody opens nothing"
            continue
        if row["answer"] == "abstains":
            assert (row["error"], row["talker"], row["finish_reason"]) == (
                None,
                None,
                "stop",
            ), "it does not apply"
            continue
        assert row["error"].startswith("talker: " + WRONG[row["answer"]]), row["error"]
        assert row["finish_reason"] == "error" and row["talker"] is None


def test_a_program_may_name_the_ids_at_which_a_turn_ends_anyway_and_no_others(chatty: Path) -> None:
    g = Graph("stops")
    generator = Generator(Model(str(chatty)).frozen(), group_size=1, max_tokens=4, slots=8)
    tasks = [{"prompt": str(load_tokenizer(Model(str(chatty))).eos_token_id), "answer": "stops"}]
    stops = agent(COMMAND, name="talker", columns=("answer",), returns=bool, imports=SHARED)
    (row,) = collect(
        stops(generator, g.source(Prompts(tasks, columns=("answer",), epochs=1))), rows=1
    ).to_pylist()
    assert (row["error"], row["talker"]) == (None, True)


# Whole runs


@pytest.mark.slow
def test_a_run_of_agents_trains_every_group_once_and_none_beyond_the_bound(
    chatty: Path, tmp_path: Path
) -> None:
    result = run(graph(chatty), steps=STEPS, runs=tmp_path, quiet=True)
    assert result.verdict.clean, result.verdict.line
    assert (
        f"{STEPS * 4} trained + 0 dropped" in result.verdict.line
        and "max staleness 1 of 1" in result.verdict.line
    )
    assert not pc.any(pc.is_valid(rollouts(result).column("error"))).as_py()
    assert {line["eval_n"] for line in result.metrics if "eval_n" in line} == {6}
    nothing_is_left(result)


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim", ["talker", pytest.param("generator", marks=SLOW), pytest.param("trainer", marks=SLOW)]
)
def test_a_run_of_agents_whose_worker_is_killed_goes_on_and_is_clean(
    victim: str, chatty: Path, tmp_path: Path
) -> None:
    goes_on_after_a_kill(graph(chatty), victim, tmp_path)


@pytest.mark.slow
def test_programs_of_a_run_that_is_cut_off_are_told_their_turns_again(
    chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on_turn_by_turn(
        lambda: graph(chatty, max_staleness=0, eval_every=100), AgentsRuntime, tmp_path, monkeypatch
    )
