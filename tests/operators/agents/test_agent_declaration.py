"""What an agent declares: columns, its program's words, what is refused."""

import sys
from pathlib import Path
from typing import Any

import pytest

from dataflow import Graph, Model
from dataflow.errors import GraphError
from dataflow.testing import FakeGenerator, FakePrompts
from operators import Endpoint, Generator, Prompts, agent, episode
from operators.agents.programs import environment

GENERATOR = Generator(Model("policies/any"), group_size=4)


def prompts() -> Prompts:
    return Prompts([{"prompt": "2+2=", "answer": "4"}], columns=("answer",))


def test_an_agent_makes_rollouts_with_turns_and_the_column_of_what_it_returns() -> None:
    solve = agent("python tools/solve.py --ask {prompt}", columns=("answer",), returns=int)
    g = Graph("g")
    made = solve(GENERATOR, g.source(prompts()))
    assert {"completion", "mask", "turn", "turn_reward", "solve"} <= set(made.columns)
    assert g.operators["solve"].asks is GENERATOR and g.nx.has_edge(
        "solve", "generator", key="turns"
    )
    assert "solve" not in agent("python solve.py")(GENERATOR, Graph("h").source(prompts())).columns


def test_words_of_a_command_are_values_and_no_shell_reads_them() -> None:
    solve = agent(
        "python 'my tools/solve.py' --ask {prompt} {other} '{answer}'",
        columns=("answer",),
        name="solve",
    )
    row = {"prompt": "a b; rm -rf {answer}", "answer": 4}
    assert solve.words(row) == [
        sys.executable,
        "my tools/solve.py",
        "--ask",
        "a b; rm -rf {answer}",
        "{other}",
        "4",
    ]


def test_an_endpoint_in_a_generators_place_says_where_it_stands() -> None:
    g = Graph("g")
    agent("python solve.py")(
        Endpoint(GENERATOR, model="mine", port=8123, past="rendered"), g.source(prompts())
    )
    found: Any = g.operators["solve"]
    assert (found.model_name, found.port, found.past, found.generator) == (
        "mine",
        8123,
        "rendered",
        GENERATOR,
    )
    assert found.traits.port == 8123, "the plan puts no other there"


@pytest.mark.parametrize(
    ("command", "knobs", "said"),
    [
        ("", {}, "has no program"),
        ("python solve.py {answer}", {}, r"names \['answer'\] in its command"),
        ("solve --fast", {"imports": ("json",)}, "is no Python program"),
        ("python -u", {"imports": ("json",)}, "is no Python program"),
        ("python solve.py", {"output_kb": 0}, "has output_kb=0"),
        ("python solve.py", {"concurrency": True}, "has concurrency=True"),
        ("python solve.py", {"timeout_s": 0}, "has timeout_s=0"),
    ],
)
def test_knobs_that_cannot_be_right_are_refused(
    command: str, knobs: dict[str, Any], said: str
) -> None:
    with pytest.raises(GraphError, match=said):
        agent(command, **knobs)(GENERATOR, Graph("g").source(prompts()))


def test_what_no_column_holds_is_refused() -> None:
    with pytest.raises(GraphError, match="which no column of an episode holds"):
        agent("python solve.py", returns=dict)


def test_it_is_applied_to_a_generator_that_answers_turns() -> None:
    @episode
    async def other(chat: Any) -> None:
        await chat.say()

    solve, stream = agent("python solve.py"), Graph("g").source(prompts())
    with pytest.raises(GraphError, match="is applied to a generator and a stream"):
        solve(stream, GENERATOR)
    for no_generator in (other, FakeGenerator(model=Model("m"))):
        with pytest.raises(GraphError, match="asks a generator for the policy's turns"):
            solve(no_generator, Graph("g").source(FakePrompts()))
    with pytest.raises(GraphError, match="has no generator"):
        Graph("g").apply(solve, Graph("h").source(prompts()))


def test_a_program_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    assert "found no such file" in str(agent(f"python {tmp_path}/none.py").missing())
    assert "found no such program" in str(agent("no-such-program-anywhere").missing())


def test_a_module_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "solve.py"
    script.write_text("")
    (tmp_path / "beside_the_script.py").write_text("")
    for modules, missing in (
        (("json", "no_such_thing.inner"), True),
        (("json", "beside_the_script"), False),
    ):
        said = agent(f"python {script}", imports=modules).missing()
        assert ("cannot import 'no_such_thing.inner'; found no such module" in str(said)) == missing
    assert "no_such_thing" not in str(
        agent(f"/bin/sh {script}", imports=("no_such_thing",)).missing()
    )


def test_a_program_finds_the_endpoint_and_no_proxy_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    found = environment("http://127.0.0.1:1", "sk-1", {"MORE": "1", "OPENAI_API_KEY": "another"})
    assert found == {
        "OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
        "OPENAI_API_KEY": "sk-1",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:1",
        "ANTHROPIC_API_KEY": "sk-1",
        "MORE": "1",
        "NO_PROXY": "example.org,127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
