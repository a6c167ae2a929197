"""The packages themselves, each with a task of its own: a few steps by a tiny policy, whose ledger
is clean.
"""

import asyncio
import contextlib
import json
import os
import socket
import string
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rigs.machine import wait_until
from rigs.worlds.served_alone import free_port
from test_playing import Spoken

from dataflow import Graph, Model, Result, run
from dataflow.folder.run_folder import RunFolder
from operators import Evaluate, Generator, Trainer
from operators.credit import advantage
from operators.environments import environment
from operators.environments.declaration import PlayedEnvironment
from operators.losses import aipo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("forked", "one_core"),
    pytest.mark.timeout(300),
]

STEPS = 3
LETTERS = string.printable[:95] + "\n"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def needs(package: str, extra: str) -> None:
    pytest.importorskip(
        package, reason=f'{package} is not installed; pip install "dataflow-rl[{extra}]"'
    )


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with random weights that writes any ASCII, in a context of 4,096 tokens."""
    from operators.warm_start.launch import WarmStartSpec
    from operators.warm_start.train import character_tokenizer, small_llama

    folder = tmp_path_factory.mktemp("writer")
    spec = WarmStartSpec(
        alphabet=LETTERS,
        layers=1,
        width=32,
        heads=2,
        mlp_width=64,
        max_positions=4096,
        steps=1,
        batch_size=1,
        learning_rate=1e-3,
        seed=0,
        threads=1,
        examples_sha256="",
    )
    tokenizer = character_tokenizer(LETTERS, 4096)
    tokenizer.chat_template = TEMPLATE
    small_llama(spec, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trained(
    world: PlayedEnvironment,
    policy: Path,
    runs: Path,
    *,
    chat: bool = False,
    rows: Any = None,
    **prompts: Any,
) -> pa.Table:
    """The rollouts of a run that plays a world."""
    g, model = Graph("real"), Model(str(policy))
    generator = Generator(model, group_size=2, max_tokens=6, slots=16, chat=chat)
    trainer = Trainer(model, loss=partial(aipo, rho=4.0), prompts_per_step=4, lr=1e-3)
    train, unseen = (range(100), range(100, 104)) if rows is None else (rows, rows[:4])
    trainer(advantage(world(generator, g.source(world.tasks(train, chat=chat, **prompts)))))
    held_out = world.tasks(unseen, chat=chat, name="held_out", group_size=1, **prompts)
    Evaluate(every_steps=2)(world(generator, g.source(held_out)))
    g.feedback(trainer.weights, generator, max_staleness=1)
    result: Result = run(g, steps=STEPS, runs=runs, quiet=True)
    assert result.verdict.clean, result.verdict.line
    assert f"{STEPS * 4} trained + 0 dropped" in result.verdict.line
    files = RunFolder.open(result.folder).rollouts_of()
    table = pa.concat_tables([files.read(step) for step in range(1, STEPS + 1)])
    assert table.column("error").null_count == len(table) and table.column("reward").null_count == 0
    for row in table.to_pylist():
        assert sum(row["turn_reward"]) == pytest.approx(row["reward"])
    return table


def test_gymnasium_cart_pole(writer: Path, tmp_path: Path) -> None:
    needs("gymnasium", "gymnasium")
    world = environment(
        "gymnasium:CartPole-v1",
        max_turns=80,
        wording=lambda seen: f"{seen[2]:.2f};",
        action=lambda said: len(said) % 2,
    )
    table = trained(world, writer, tmp_path)
    assert set(table.column("finish_reason").to_pylist()) == {"stop"}
    for row in table.to_pylist():
        assert row["reward"] == max(row["turn"]) + 1 >= 8, (
            "each step is worth 1 until the pole falls"
        )


def test_gymnasium_frozen_lake_is_cut_off_by_its_own_limit(writer: Path, tmp_path: Path) -> None:
    needs("gymnasium", "gymnasium")
    options = {"actions": ("left", "down", "right", "up"), "max_episode_steps": 5}
    world = environment("gymnasium:FrozenLake-v1", options=options, max_turns=80, invalid=0)
    table = trained(world, writer, tmp_path, intro="Cross the lake from ")
    assert set(table.column("finish_reason").to_pylist()) == {"length"}
    assert {row["prompt"] for row in table.to_pylist()} == {"Cross the lake from 0"}


def test_textarena_guess_the_number(writer: Path, tmp_path: Path) -> None:
    needs("textarena", "textarena")

    def number(said: str) -> str:
        return f"[{sum(map(ord, said)) % 20 + 1}]"

    world = environment("textarena:GuessTheNumber-v0", action=number, max_turns=20)
    table = trained(world, writer, tmp_path)
    rows = table.to_pylist()
    assert all(
        row["prompt"].startswith("You are Player 0. You are playing Guess The Number.")
        for row in rows
    )
    assert any("The target number is" in row["completion"] for row in rows)
    assert all(0 <= row["reward"] <= 1 for row in rows) and {
        row["finish_reason"] for row in rows
    } == {"stop"}


def test_textarena_nim_with_an_opponent(writer: Path, tmp_path: Path) -> None:
    needs("textarena", "textarena")

    def takes(said: str) -> str:
        return "[0 1]"

    options = {"players": 2, "seat": 1, "opponent": takes}
    world = environment("textarena:Nim-v0", options=options, action=takes)
    rows = trained(world, writer, tmp_path).to_pylist()
    assert {row["reward"] for row in rows} <= {-1.0, 0.0, 1.0} and {
        row["finish_reason"] for row in rows
    } == {"stop"}


def test_reasoning_gym_basic_arithmetic(writer: Path, tmp_path: Path) -> None:
    needs("reasoning_gym", "reasoning-gym")
    world = environment("reasoning-gym:basic_arithmetic", options={"attempts": 2, "max_digits": 1})
    rows = trained(world, writer, tmp_path).to_pylist()
    assert all("That is not right" in row["completion"] for row in rows if row["reward"] < 1)
    assert len({row["prompt"] for row in rows}) > 6


def test_skyrl_gym_gsm8k_in_turns(writer: Path, tmp_path: Path) -> None:
    needs("skyrl_gym", "skyrl-gym")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n}+1="}],
            "env_class": "gsm8k_multi_turn",
            "reward_spec": {"method": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"max_turns": 2},
        }
        for n in range(16)
    ]
    world = environment("skyrl-gym:gsm8k_multi_turn")
    made = trained(world, writer, tmp_path, chat=True, rows=rows).to_pylist()
    assert all(max(row["turn"]) == 1 for row in made if row["reward"] < 1)
    assert any("Now provide only the final numeric answer" in row["completion"] for row in made)


@contextlib.contextmanager
def openenv_server(places: int) -> Iterator[str]:
    """A server of the package's own with an environment written as its documentation says."""
    import uvicorn
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        message: str

    class Shown(Observation):
        response: str

    class Echo(Environment[Say, Shown, State]):
        """Two turns; each is worth the share of letters."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._state = State()

        def reset(
            self, seed: int | None = None, episode_id: str | None = None, **more: Any
        ) -> Shown:
            self._state = State(episode_id=episode_id, step_count=0)
            return Shown(response=f"say {seed}", done=False)

        def step(self, action: Say, timeout_s: float | None = None, **more: Any) -> Shown:
            self._state.step_count += 1
            share = sum(map(str.isalpha, action.message)) / max(1, len(action.message))
            return Shown(
                response=f"heard {len(action.message)}",
                reward=share,
                done=self._state.step_count == 2,
            )

        @property
        def state(self) -> State:
            return self._state

    app = create_app(Echo, Say, Shown, env_name="echo", max_concurrent_envs=places)
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="error", ws_ping_interval=0.5, ws_ping_timeout=20)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    began = time.monotonic()
    while not server.started:
        assert thread.is_alive() and time.monotonic() - began < 60
        time.sleep(0.05)
    yield f"ws://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(20)


def test_openenv_with_fewer_places_than_episodes_that_want_one(
    writer: Path, tmp_path: Path
) -> None:
    needs("openenv.core", "openenv")
    needs("websockets", "openenv")
    with openenv_server(places=2) as url:
        # one more than there is room for: it waits
        world = environment(f"openenv:{url}", sessions=3)
        rows = trained(world, writer, tmp_path, intro="Speak.\n").to_pylist()
    for row in rows:
        seed = json.loads(row["task"])["seed"]
        assert (
            row["completion"].startswith(f"say {seed}")
            and max(row["turn"]) == 1
            and 0 <= row["reward"] <= 2
        )


NEMO_GYM = """
import sys
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.server_utils import ServerClient

match sys.argv[1]:
    case "counter":
        from resources_servers.example_session_state_mgmt import app
        Server = app.StatefulCounterResourcesServer
    case "blackjack":
        from resources_servers.blackjack.app import BlackjackEnv as Server
config = Server.model_fields["config"].annotation(
    host="127.0.0.1", port=1, entrypoint="", name=sys.argv[1]
)
app = Server(config=config, server_client=MagicMock(spec=ServerClient)).setup_webserver()
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error")
"""
"""Serves one of NeMo-Gym's own environments, as its `run_webserver` does once it has read its
configuration."""


@contextlib.contextmanager
def nemo_gym_server(which: str) -> Iterator[str]:
    """By the interpreter that DATAFLOW_NEMO_GYM_PYTHON names, which has nemo_gym: it asks for
    another than this one.
    """
    python = os.environ.get("DATAFLOW_NEMO_GYM_PYTHON")
    if not python:
        pytest.skip("DATAFLOW_NEMO_GYM_PYTHON names no interpreter that has nemo_gym")
    needs("httpx", "nemo-gym")
    port = free_port()
    process = subprocess.Popen([python, "-c", NEMO_GYM, which, str(port)])
    try:
        wait_until(lambda: process.poll() is not None or listens(port), 120, "the server")
        assert process.poll() is None
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def counting(initial: int, expected: int) -> dict[str, Any]:
    """A row as the environment's own data has them."""
    asked = [{"role": "user", "content": "add 1 then add 2 then get the count"}]
    return {
        "responses_create_params": {"input": asked},
        "initial_count": initial,
        "expected_count": expected,
    }


def test_nemo_gyms_counter_keeps_the_session_over_its_tools_and_verifies(
    writer: Path, tmp_path: Path
) -> None:
    def call(name: str, **arguments: int) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    with nemo_gym_server("counter") as url:
        world = environment(f"nemo-gym:{url}", sessions=4, max_turns=4)
        for more, reward in ((2, 1.0), (3, 0.0)):
            said = [
                call("increment_counter", count=1),
                call("increment_counter", count=more),
                call("get_counter_value"),
            ]
            chat = Spoken([*said, "it is counted"])
            assert asyncio.run(world(chat, prompt="", task=json.dumps(counting(3, 6)))) == reward
            assert chat.heard == ['{"success":true}', '{"success":true}', f'{{"count":{4 + more}}}']
        rows = [counting(n, n + n % 2) for n in range(24)]
        table = trained(world, writer, tmp_path, chat=True, rows=rows)
    found = {
        (json.loads(row["task"])["initial_count"] % 2, row["reward"]) for row in table.to_pylist()
    }
    assert found == {(0, 1.0), (1, 0.0)}, "the policy calls nothing: the count is what it was"


def test_nemo_gyms_blackjack_is_played_step_by_step(writer: Path, tmp_path: Path) -> None:
    def action(said: str) -> str:
        return f"<action>{'hit' if len(said) % 2 else 'stand'}</action>"

    with nemo_gym_server("blackjack") as url:
        world = environment(
            f"nemo-gym:{url}", options={"protocol": "step"}, action=action, sessions=4, max_turns=12
        )
        asked = [{"role": "user", "content": "Play."}]
        rows = [{"responses_create_params": {"input": asked}, "number": n} for n in range(16)]
        found = trained(world, writer, tmp_path, chat=True, rows=rows).to_pylist()
    assert {row["reward"] for row in found} <= {-1.0, 0.0, 1.0} and {
        row["finish_reason"] for row in found
    } == {"stop"}
    assert all("Your hand: [" in row["completion"] for row in found)
