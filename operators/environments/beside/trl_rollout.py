"""One rollout of what was written for TRL, as a program that calls the endpoint of a run.

    python trl_rollout.py FILE:NAME SETTINGS    a row on stdin; the reward is the last line, null
                                                where there is none

NAME is a `rollout_func`, a class for `environment_factory`, or a dictionary of those, of which the
row's `environment` names one. SETTINGS is JSON: `kind` ("rollout_func" or "environment"),
`tokenizer`, `max_tokens`, `rounds` of calls of tools, and `gives`, the extra field of a
`rollout_func` that is the reward.
"""

import asyncio
import functools
import importlib
import importlib.util
import inspect
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RESERVED = ("reset", "get_reward")
"""Methods of an environment that are no tools."""


class NoTurnLeft(Exception):
    """The run answers no further calls of this rollout."""


def ask(place: str, body: dict[str, Any]) -> Any:
    """What the endpoint answers. Raises NoTurnLeft."""
    root = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
    }
    request = urllib.request.Request(
        f"{root}{place}", json.dumps({"model": "policy", **body}).encode(), headers
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        reply = error.read().decode("utf-8", "replace")
        if '"rollout_over"' in reply:
            raise NoTurnLeft(reply) from None
        raise RuntimeError(f"the run refuses a call with status {error.code}: {reply}") from None


def loaded(place: str) -> Any:
    """What stands at file.py:name, or module:name."""
    path, _, name = place.rpartition(":")
    if path.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(path)
    return getattr(module, name)


class PolicyGeneration:
    """`trainer.vllm_generation`: takes ids, returns ids and log-probabilities, which are turns of
    the policy.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.drawn: list[tuple[list[int], list[int]]] = []
        """Prompt and completion of each turn."""

    def generate(
        self, prompts: list[Any], images: Any = None, num_generations: int = 1, **_: Any
    ) -> tuple[Any, ...]:
        """As TRL's: prompts, completions, log-probabilities and their ids, a list of one for each
        token.
        """
        if images is not None and any(images):
            raise ValueError(
                "images cannot be given here: the generator of a run takes text alone; leave"
                " them out"
            )
        drawn = []
        for prompt in prompts:
            body = {
                "token_ids": list(prompt),
                "sampling_params": {"max_tokens": self._max_tokens, "logprobs": 1},
            }
            choice = ask("/inference/v1/generate", body)["choices"][0]
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            self.drawn.append((list(prompt), choice["token_ids"]))
            drawn.append((choice["token_ids"], logprobs))
        completions = [ids for ids, _ in drawn]
        alone = [[[value] for value in logprobs] for _, logprobs in drawn]
        return (
            [list(prompt) for prompt in prompts],
            completions,
            alone,
            [[[token] for token in ids] for ids in completions],
        )


class RunTrainer:
    """What a `rollout_func` is given for its trainer: a tokenizer, settings, and what generates. It
    has no model.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._tokenizer = settings["tokenizer"]
        most = settings["max_tokens"]
        self.args = SimpleNamespace(
            num_generations=1, max_completion_length=most, per_device_train_batch_size=1
        )
        self.num_generations, self.max_completion_length = 1, most
        self.use_vllm, self.vllm_mode = True, "server"
        self.accelerator = SimpleNamespace(process_index=0, num_processes=1, is_main_process=True)
        self.vllm_generation = PolicyGeneration(most)

    @functools.cached_property
    def processing_class(self) -> Any:
        """The policy's tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer.{name} cannot be had: the rollout runs apart from trainer and generator, and"
            " its policy is asked for turns; use trainer.vllm_generation.generate(prompts=ids), or"
            " the server at OPENAI_BASE_URL"
        )


def rolled_out(function: Any, row: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Call a `rollout_func` with one prompt; its reward, after a look at whether it returns what
    was sampled.
    """
    trainer = RunTrainer(settings)
    output = function([row["prompt"]], trainer)
    missing = {"prompt_ids", "completion_ids", "logprobs"} - set(output)
    if missing:
        raise ValueError(
            f"rollout_func returned no {sorted(missing)}; found {sorted(output)}; return each of"
            " them"
        )
    ids = output["completion_ids"][0]
    mask = output.get("env_mask", [[1] * len(ids)])[0]
    drawn = [token for _, completion in trainer.vllm_generation.drawn for token in completion]
    policy_tokens = [token for token, is_drawn in zip(ids, mask, strict=True) if is_drawn]
    if len(output["completion_ids"]) != 1 or (drawn and policy_tokens != drawn):
        raise ValueError(
            "rollout_func returns other tokens than the policy has said; found"
            f" {len(policy_tokens)} where"
            f" {len(drawn)} were drawn for one prompt; return what was drawn, with env_mask 0 where"
            " the world has spoken"
        )
    return output[settings["gives"]][0] if settings.get("gives") else None


def messages_in(prompt: str) -> Any:
    """The chat that a prompt is the JSON of; any other text as it is.

    >>> messages_in('[{"role": "user", "content": "2+2="}]')
    [{'role': 'user', 'content': '2+2='}]
    >>> messages_in("[1, 2] has how many numbers?")
    '[1, 2] has how many numbers?'
    """
    try:
        messages = json.loads(prompt)
    except ValueError:
        return prompt
    is_chat = (
        isinstance(messages, list)
        and messages
        and all(isinstance(message, dict) and "role" in message for message in messages)
    )
    return messages if is_chat else prompt


def played(world: Any, row: dict[str, Any], rounds: int) -> Any:
    """Reset an environment, let the policy call its methods, and ask it for the reward."""
    from transformers.utils.chat_template_utils import get_json_schema

    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    observation = world.reset(**row)
    if observation is not None:
        messages[-1] = {**messages[-1], "content": messages[-1]["content"] + observation}
    methods = inspect.getmembers(world, inspect.ismethod)
    tools = {
        name: method
        for name, method in methods
        if name not in RESERVED and not name.startswith("_")
    }
    schemas = [get_json_schema(tool) for tool in tools.values()]
    with asyncio.Runner() as runner:
        for rounds_left in range(rounds, -1, -1):
            try:
                answer = ask("/v1/chat/completions", {"messages": messages, "tools": schemas})
            except NoTurnLeft:
                break  # its reward is that of the world as it was left
            message = answer["choices"][0]["message"]
            calls = message.get("tool_calls") or []
            if not calls or not rounds_left:
                break
            messages.append({key: value for key, value in message.items() if value is not None})
            for call in calls:
                result = result_of(tools, call, runner)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return waited_for(world.get_reward(), runner) if hasattr(world, "get_reward") else None


def waited_for(value: Any, runner: asyncio.Runner) -> Any:
    """What a method returned, or the coroutine that it returned returns."""

    async def wait() -> Any:
        return await value

    return runner.run(wait()) if inspect.isawaitable(value) else value


def result_of(tools: dict[str, Any], call: dict[str, Any], runner: asyncio.Runner) -> str:
    """A call's result; an exception of a tool becomes text for the policy."""
    name = call["function"]["name"]
    try:
        if name not in tools:
            raise ValueError(f"Tool {name} not found.")
        return str(waited_for(tools[name](**json.loads(call["function"]["arguments"])), runner))
    except Exception as error:
        return str({"error": str(error)})


def main(arguments: list[str]) -> int:
    """As the module says."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is no result
    place, settings = arguments[0], json.loads(arguments[1])
    row = json.loads(sys.stdin.readline())
    row["prompt"] = messages_in(row["prompt"])
    target = loaded(place)
    if settings["kind"] == "rollout_func":
        reward = rolled_out(target, row, settings)
    else:
        factory = target[row.pop("environment")] if isinstance(target, dict) else target
        reward = played(factory(), row, settings["rounds"])
    print(json.dumps(None if reward is None else float(reward)), file=out)
    out.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
