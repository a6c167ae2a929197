"""What counts as work of an episode's processes, and what is told of those that fail."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from dataflow import Graph, Model, WorldFailed, collect
from operators import Generator, Prompts, episode
from operators.episodes.chat import Chat
from operators.episodes.runtime import EpisodesRuntime


@pytest.mark.parametrize(("isolate", "share"), [(True, 0.5), (False, 0.0)])
def test_functions_that_wait_for_the_policy_are_not_at_work(isolate: bool, share: float) -> None:
    runtime = object.__new__(EpisodesRuntime)
    runtime.__dict__ |= {
        "_worlds": SimpleNamespace(open_calls=6), "_asked": dict.fromkeys("ab"), "_at_once": 8,
        "_episode": SimpleNamespace(works_beside=isolate),
    }  # fmt: skip
    assert runtime.beside() == share


def test_the_first_failure_of_each_cause_is_told_in_the_log(policy: Path) -> None:
    """Before as many groups were dropped as end a run; and once, however many fail."""

    @episode(isolate=False)
    async def falls(chat: Chat, answer: str) -> float:
        if answer == "world":
            raise WorldFailed("nobody is there")
        raise KeyError(answer)

    rows = [{"prompt": f"{n}=", "answer": "world" if n % 2 else "other"} for n in range(6)]
    g, generator = Graph("falls"), Generator(Model(str(policy)).frozen(), group_size=2, max_tokens=2, slots=4)
    with capture_logs() as logs:
        found = collect(falls(generator, g.source(Prompts(rows, columns=("answer",), epochs=1))), rows=12)
    assert found.column("error").null_count == 0
    told = {line["cause"]: line["first"] for line in logs if line["event"] == "rollouts fail"}
    assert len([line for line in logs if line["event"] == "rollouts fail"]) == 2
    assert "KeyError" in told["raised"] and "nobody is there" in told["world"] and told["world"].startswith("falls: ")
