"""Environments of SkyRL-gym: a row makes each, and what it says are messages."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Mapping
from typing import Any

from dataflow.errors import WorldFailed
from operators.environments.session import Seen


def make(name: str, *, env_config: Any = None, **options: Any) -> SkyRLGymSession:
    """Environments of this id; each reset makes one of the row, as `extras`, and of
    `env_config`.
    """
    import skyrl_gym

    def made(extras: Mapping[str, Any]) -> Any:
        return skyrl_gym.make(name, env_config=env_config, extras={**options, **extras})

    return SkyRLGymSession(made)


class SkyRLGymSession:
    """One environment at a time, in a thread of its own: many of these wait for searches and
    programs.
    """

    def __init__(self, make: Callable[[Mapping[str, Any]], Any]) -> None:
        self._made = make
        self._env: Any = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="skyrl-gym")

    async def reset(self, task: Mapping[str, Any], seed: int) -> Seen:
        """As `Session.reset`; the task is the row."""
        prompt = task.get("prompt") or []
        await self._in_thread(self._begin, task)
        messages, _ = await self._in_thread(
            lambda: self._env.init([dict(message) for message in prompt])
        )
        if messages[: len(prompt)] != prompt:
            raise WorldFailed(
                f"the environment writes the prompt anew; found {str(messages)[:200]}; give rows"
                " with the prompt that it wants to see"
            )
        return self._seen(messages[len(prompt) :], {})

    def read(self, text: str) -> str:
        """The turn unchanged."""
        return text

    async def step(self, action: str) -> Seen:
        """As `Session.step`. What was sampled stays: an environment that rewrites a turn fails."""
        outcome = await self._in_thread(lambda: self._env.step(action))
        if outcome.get("postprocessed_action") not in (None, action):
            raise WorldFailed(
                "the environment rewrites what the policy said; found"
                f" {outcome['postprocessed_action']!r:.200}; let the generator stop there:"
                " Generator(stop=...)"
            )
        return self._seen(outcome["observations"], outcome)

    async def close(self) -> None:
        closing = None if self._env is None else self._thread.submit(self._env.close)
        # what was asked for before is still done, behind a step that hangs too
        self._thread.shutdown(wait=False)
        if closing is not None:
            await asyncio.shield(asyncio.wrap_future(closing))

    def _begin(self, task: Mapping[str, Any]) -> None:
        if self._env is not None:
            self._env.close()
        self._env = self._made(task)

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _seen(self, messages: Any, outcome: Mapping[str, Any]) -> Seen:
        text = "\n".join(str(message["content"]) for message in messages)
        return Seen(
            raw=messages,
            text=text,
            reward=outcome.get("reward"),
            terminated=bool(outcome.get("done")),
        )
