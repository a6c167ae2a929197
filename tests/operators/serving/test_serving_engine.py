"""The endpoint over the real engine: what comes out is the model's, and what is recorded is what
was drawn.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from log_distribution import log_distribution
from rigs.machine import wait_until
from serving_rig import (
    END,
    WAIT_S,
    ScriptedEngine,
    post_and_leave,
    scripted,
    served,
    service_of,
    tiny_llama,
)
from starlette.testclient import TestClient

from operators.engine import build
from operators.engine.decode import Engine
from operators.engine.sampler import Sampling
from operators.serving.app import make_app
from operators.serving.rows import read_rollouts

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model(tokenizer):
    """A tiny Llama whose attention is left as it is: the reference."""
    return tiny_llama(len(tokenizer))


@pytest.fixture
def engine(tokenizer):
    """An engine of its own on the same weights."""
    decoder = tiny_llama(len(tokenizer)).requires_grad_(False)
    found = build.adapt(decoder, "tiny")
    return Engine(
        decoder,
        slots=8,
        context_tokens=128,
        sampling=Sampling(),
        end_tokens=[END],
        kernel=found.kernel,
        token_bytes=found.token_bytes,
    )


@pytest.fixture
def client(engine, tokenizer, rows):
    with TestClient(
        make_app(service_of(engine, tokenizer, rows)), base_url="http://localhost"
    ) as client:
        yield client


def complete(client, **body):
    answer = client.post(
        "/v1/completions", json={"model": "tiny", "return_token_ids": True, **body}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


@torch.no_grad()
def recomputed(model, row, **knobs):
    """Log-probabilities of a row's completion from one full pass."""
    ids, mask = torch.tensor(row["tokens"]), np.array(row["mask"])
    start = int(mask.argmax())
    logits = model(input_ids=ids[None], use_cache=False).logits[0, start - 1 : -1]
    seen = torch.zeros(len(ids) - start, logits.shape[1], dtype=torch.bool)
    for place in range(start, len(ids)):
        seen[place - start, ids[:place]] = True
    table = log_distribution(
        logits, Sampling(**knobs), seen if "repetition_penalty" in knobs else None
    )
    return table.gather(1, ids[start:, None])[:, 0].numpy()


def test_greedy_completions_are_those_of_generate(client, model, tokenizer):
    for text in ("hello world", "a", "assistant of the user " * 2):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        expected = model.generate(ids, max_new_tokens=20, do_sample=False)[
            0, ids.shape[1] :
        ].tolist()
        (choice,) = complete(client, prompt=text, max_tokens=20, temperature=0)
        assert choice["token_ids"] == expected
        text = [token for token in expected if token != END]
        assert choice["text"] == tokenizer.decode(text, skip_special_tokens=True)


def test_alternatives_are_the_likeliest_of_a_full_pass(client, model, rows):
    for knobs in ({}, {"temperature": 1.3, "top_k": 3}, {"top_p": 0.8}, {"temperature": 0}):
        (choice,) = complete(
            client, prompt="hello world", max_tokens=6, logprobs=5, seed=3, **knobs
        )
        ids = torch.tensor(rows[-1]["tokens"])
        start = len(ids) - len(choice["token_ids"])
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, start - 1 : -1]
        table = log_distribution(logits, Sampling(**knobs), None)
        found = choice["logprobs"]["top_logprobs"]
        assert len(found) == len(choice["token_ids"])
        for row, likeliest in zip(table, found, strict=True):
            best = row.topk(5).values
            np.testing.assert_allclose(list(likeliest.values()), best[best > -torch.inf], atol=1e-4)


KNOBS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"repetition_penalty": 1.4},
]


def test_recorded_logprobs_are_those_of_a_full_pass_whatever_runs_beside(
    engine, tokenizer, model, rows
):
    with served(service_of(engine, tokenizer, rows)) as address:

        async def ask_all():
            async with httpx.AsyncClient(base_url=address, timeout=WAIT_S) as client:
                asks = [
                    client.post(
                        "/v1/completions",
                        json={
                            "model": "tiny",
                            "prompt": "hello " * (i + 1),
                            "max_tokens": 12 + i,
                            "user": str(i),
                            **k,
                        },
                    )
                    for i, k in enumerate(KNOBS * 3)
                ]
                return await asyncio.gather(*asks)

        answers = asyncio.run(ask_all())
    assert {answer.status_code for answer in answers} == {200}
    assert len(rows) == len(KNOBS) * 3
    for row in rows:
        knobs = KNOBS[int(row["session_id"]) % len(KNOBS)]
        mask = np.array(row["mask"])
        np.testing.assert_allclose(
            np.array(row["logprobs"])[mask], recomputed(model, row, **knobs), atol=1e-5
        )
        assert row["error"] is None and set(np.array(row["versions"])[mask]) == {0}


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_crowd(client, rows):
    (alone,) = complete(client, prompt="hello", max_tokens=20, seed=11)
    crowd = complete(client, prompt=["hello", "x", "y y"], max_tokens=20, seed=11, n=2)
    assert crowd[0]["token_ids"] == alone["token_ids"] != crowd[1]["token_ids"]


def test_a_stop_string_ends_a_rollout_of_the_real_engine(client):
    (whole,) = complete(client, prompt="hello", max_tokens=40, seed=3)
    stop = whole["text"][3:5]
    (cut,) = complete(client, prompt="hello", max_tokens=40, seed=3, stop=stop)
    assert (
        cut["finish_reason"] == "stop" and cut["text"] == whole["text"][: whole["text"].find(stop)]
    )
    assert whole["token_ids"][: len(cut["token_ids"])] == cut["token_ids"]


def test_weights_change_under_a_running_server(client, model, tokenizer, rows):
    other = tiny_llama(len(tokenizer), seed=1)
    models = {0: model, 4: other}
    thread = client.app.state.service.thread
    long = threading.Thread(
        target=complete, args=(client,), kwargs={"prompt": "hello", "max_tokens": 110, "n": 4}
    )
    long.start()
    wait_until(lambda: thread.engine.steps >= 2 or rows, what="a few tokens")

    def apply(tensors):
        for name, tensor in other.state_dict().items():
            if name in tensors:
                tensors[name].copy_(tensor)

    thread.update(4, apply, timeout_s=WAIT_S)
    long.join(WAIT_S)
    complete(client, prompt="hello", max_tokens=10)
    later = rows[-1]
    assert set(np.array(later["versions"])[later["mask"]]) == {4}
    for row in rows:
        mask, versions = np.array(row["mask"]), np.array(row["versions"])
        assert (np.diff(versions[mask]) >= 0).all()
    np.testing.assert_allclose(
        np.array(later["logprobs"])[later["mask"]], recomputed(models[4], later), atol=1e-5
    )
    assert client.get("/health").json()["version"] == 4


def test_the_openai_client_is_served(engine, tokenizer, rows):
    openai = pytest.importorskip("openai")
    with (
        served(service_of(engine, tokenizer, rows), api_key="secret") as address,
        openai.OpenAI(
            base_url=f"{address}/v1", api_key="secret", timeout=WAIT_S, max_retries=0
        ) as client,
    ):
        messages = [{"role": "user", "content": "hello"}]
        chat = client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=8,
            seed=1,
            logprobs=True,
            n=2,
            extra_body={"top_k": 20},
            extra_headers={"X-Session-Id": "a"},
        )
        assert chat.usage.completion_tokens == sum(
            len(choice.logprobs.content) for choice in chat.choices
        )
        parts = client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=8,
            seed=1,
            n=2,
            stream=True,
            extra_body={"top_k": 20},
            stream_options={"include_usage": True},
        )
        texts = ["", ""]
        for part in parts:
            for choice in part.choices:
                texts[choice.index] += choice.delta.content or ""
            usage = part.usage
        assert texts == [choice.message.content for choice in chat.choices] and usage == chat.usage
        messages += [chat.choices[0].message, {"role": "user", "content": "go on"}]
        client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=4, extra_headers={"X-Session-Id": "a"}
        )
        assert rows[-1]["parent_rollout_id"] == rows[0]["rollout_id"]
        assert rows[-1]["tokens"][: len(rows[0]["tokens"])] == rows[0]["tokens"]
        text = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=3, logprobs=0)
        # a draw may end before its third token
        counts = [len(choice.logprobs.tokens) for choice in text.choices]
        assert len(counts) == 2 and all(1 <= count <= 3 for count in counts)
        assert sum(counts) == text.usage.completion_tokens
        assert [model.id for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="the prompt is too long"):
            client.completions.create(model="tiny", prompt="x" * 200)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_rollouts(tokenizer, rows, stream):
    permits = threading.Semaphore(3)
    engine = scripted(tokenizer, "hello world" + "x" * 100, permits=permits)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 100, "n": 2, "stream": stream}
    with served(service_of(engine, tokenizer, rows, stream_s=0.0)) as address:
        post_and_leave(address, "/v1/completions", body, lambda: engine.stepped == 3)
        # the server hears of it when its socket does, and ends them at the next step
        for _ in range(1000):
            if engine.stepped < 20:
                permits.release()
            if len(rows) == 2:
                break
            time.sleep(0.01)
    assert {row["error"] for row in rows} == {"the client went away before the rollout ended"}
    assert len(rows) == 2 and len(engine.aborted) == 2
    assert all(row["completion"].startswith("hello") and sum(row["mask"]) >= 3 for row in rows)


def test_chunks_go_out_while_the_engine_writes(tokenizer):
    permits = threading.Semaphore(1)
    engine = scripted(tokenizer, "hello world", permits=permits)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 100, "stream": True}
    with (
        served(service_of(engine, tokenizer, stream_s=0.0)) as address,
        httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=WAIT_S) as answer,
    ):
        texts = []
        for line in answer.iter_lines():
            if line and line != "data: [DONE]":
                texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                assert engine.stepped <= len(texts)
                permits.release()
    assert texts == ["hello", " world", ""]


def test_shutting_down_tells_the_client_and_records_what_was_under_way(tokenizer, rows, capfd):
    permits, over = threading.Semaphore(3), threading.Event()
    engine = ScriptedEngine(lambda prompt, seed: [5] * 1000, context_tokens=2000, permits=permits)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 900, "stream": True}
    told = []

    def ask(address):
        told.append(httpx.post(f"{address}/v1/completions", json=body, timeout=WAIT_S).text)

    def step_on():
        while not over.wait(0.02):
            permits.release()

    threads = [threading.Thread(target=step_on)]
    try:
        with served(service_of(engine, tokenizer, rows, stream_s=0.0)) as address:
            threads.append(threading.Thread(target=ask, args=(address,)))
            threads[1].start()
            wait_until(lambda: engine.stepped == 3, what="three steps")
            threads[0].start()
    finally:
        over.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert "the server was shut down before the rollout ended" in told[0] and told[0].endswith(
        "[DONE]\n\n"
    )
    assert [row["finish_reason"] for row in rows] == ["error"] and 3 <= sum(rows[0]["mask"]) < 900
    assert "Traceback" not in capfd.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model, tokenizer):
    path = tmp_path_factory.mktemp("served") / "tiny"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def command(*given, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "operators.serving", "--threads", "1", *map(str, given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_serves_a_folder_and_leaves_a_record(folder, tmp_path, ending):
    record = tmp_path / "rollouts.arrow"
    process = command(
        "--model", folder, "--port", "0", "--record", record, "--api-key-env", "KEY", KEY="secret"
    )
    try:
        line = process.stdout.readline()
        address = line.split(" at ")[1].split(",")[0]
        ask = urllib.request.Request(
            f"{address}/completions",
            json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 4}).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer secret"},
        )
        with urllib.request.urlopen(ask, timeout=WAIT_S) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] <= 4
        process.send_signal(ending)
        said, complained = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 0 and complained == ""
    assert "1 rollouts were recorded" in said and "secret" not in line + said
    assert read_rollouts(record).num_rows == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--host", "0.0.0.0"], "open to anyone who reaches 0.0.0.0; found no API key"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is empty or unset"),
        (["--port", "99999"], "there is no such port; found 99999"),
        (
            ["--host", "192.0.2.1", "--api-key-env", "HOME", "--port", "0"],
            "cannot be bound to 192.0.2.1 port 0",
        ),
        (["--slots", "0"], "needs slots of at least 1"),
        (["--model", "/no/such/folder"], "there is no folder /no/such/folder"),
        (["--chat-template", "/no/such/file"], "the chat template /no/such/file cannot be read"),
        (["--record", "/proc/none/rollouts"], "'/proc/none/rollouts' failed"),
    ],
)
def test_an_argument_that_cannot_be_right_is_one_line(folder, given, said):
    process = command("--model", folder, *given)
    try:
        out, complained = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 2 and said in complained
    assert complained.count("\n") == 1 and out == ""


def test_importing_the_package_loads_neither_torch_nor_a_server():
    program = (
        "import sys, operators.serving, operators.serving.serve;"
        " print({'torch', 'starlette'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.stdout.strip() == "set()", done.stderr
