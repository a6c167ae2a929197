"""One rollout of a taskset of verifiers, through its own server and client; or a list of its tasks.

    python verifiers_rollout.py WHAT            a row on stdin; the reward is the last line, null
                                                where there is none
    python verifiers_rollout.py WHAT --tasks N  prints the first N tasks, a line of JSON each

WHAT is JSON: `id` of the taskset, `config` of its environment, `path` of folders with its module,
`client` ("eval": calls OpenAI's API; "train": renders prompts itself, and calls the token route),
`tokenizer` for the latter, `sampling`. Ends with status 75 where what failed is no fault of the
policy's.
"""

import asyncio
import contextlib
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

START_S = 60.0
"""Most seconds until the server answers."""
WORLD_FAILED = 75
"""Exit status: what failed is outside, and may be tried again."""


class RolloutFailed(Exception):
    """The episode was not ok; the message has its errors."""


def environment_of(spec: dict[str, Any]) -> Any:
    """The config of an environment: a taskset by its id, and fields of both."""
    from verifiers.v1.utils.loaders import resolve_env_config

    config = dict(spec.get("config") or {})
    config["taskset"] = {**(config.get("taskset") or {}), "id": spec["id"]}
    return resolve_env_config(config)


def tasks_of(spec: dict[str, Any], most: int) -> Any:
    """Tasks as rows: the conversation that begins, and all that the server needs to make the task
    again.
    """
    import verifiers.v1 as vf

    for task in itertools.islice(iter(vf.load_taskset(environment_of(spec).taskset)), most):
        data = task.data.model_dump(mode="json")
        prompt = data.get("prompt")
        messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
        )
        if data.get("system_prompt"):
            messages = [{"role": "system", "content": data["system_prompt"]}, *messages]
        yield {"prompt": messages, "task": json.dumps(data)}


def client_of(spec: dict[str, Any]) -> Any:
    """The config of a client that calls the endpoint of this rollout."""
    import verifiers.v1 as vf

    place = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key_var": "OPENAI_API_KEY"}
    if spec.get("client", "eval") == "eval":
        return vf.EvalClientConfig(**place)
    return vf.TrainClientConfig(**place, renderer_model_name=spec["tokenizer"])


async def rollout(spec: dict[str, Any], task: dict[str, Any]) -> float | None:
    """Play a task; its reward, None where all of its rewards are. Raises RolloutFailed."""
    import verifiers.v1 as vf
    from verifiers.v1.serve import EnvClient, EnvServer

    with tempfile.TemporaryDirectory(prefix="verifiers-") as folder:
        server = EnvServer(environment_of(spec), f"ipc://{folder}/env")
        serving = asyncio.create_task(server.run())
        client = EnvClient(server.address)
        try:
            ready = asyncio.ensure_future(
                client.wait_for_server_startup(timeout=START_S, interval=0.05)
            )
            await asyncio.wait({ready, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                ready.cancel()
                await serving
            await ready
            episode = await client.run(
                client=client_of(spec),
                model="policy",
                sampling=vf.SamplingConfig.model_validate(spec.get("sampling") or {}),
                task_data=task,
            )
        finally:
            await client.close()
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        return reward_of(episode)


def reward_of(episode: Any) -> float | None:
    """The sum of the rewards of the traces that train the policy. Raises RolloutFailed."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or not episode.traces:
        reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise RolloutFailed(
            " ".join(reasons.split()) or "the episode was not ok, and tells no error"
        )
    trained = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
    values = [
        reward.value for trace in trained for reward in trace.rewards.values() if reward is not None
    ]
    return float(sum(values)) if values else None


def main(arguments: list[str]) -> int:
    """As the module says."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is no result
    spec = json.loads(arguments[0])
    sys.path[:0] = [str(Path(place).resolve()) for place in spec.get("path", [])]
    if arguments[1:2] == ["--tasks"]:
        for row in tasks_of(spec, int(arguments[2])):
            print(json.dumps(row), file=out)
        out.close()
        return 0
    row = json.loads(sys.stdin.readline())
    try:
        reward = asyncio.run(rollout(spec, json.loads(row["task"])))
    except (RolloutFailed, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return WORLD_FAILED
    print(json.dumps(reward), file=out)
    out.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
