"""Laws of the learning bench: budgets are equal, runs are made once, differences are between runs
of the same seed.
"""

import pytest

from bench.learning import __main__ as learning
from bench.learning.algorithms import ALGORITHMS, build
from bench.learning.figures import curve_of
from operators import Prompts

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10)]


def test_every_named_algorithm_is_a_graph_that_can_run(policy):
    assert tuple(ALGORITHMS) == learning.NAMES
    held_out = Prompts(ROWS, columns=("answer",), name="held_out", group_size=1)
    for name in ALGORITHMS:
        prompts = Prompts(4 * ROWS, columns=("answer",), epochs=1)
        graph = build(
            name,
            policy=str(policy),
            teacher=str(policy),
            prompts=prompts,
            held_out=held_out,
            every_steps=5,
        )
        graph.check()
        trained = [operator.name for operator in graph.operators.values() if operator.trains]
        assert trained == (["trainer", "critic"] if name == "ppo" else ["trainer"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_runs_are_made_in_processes_of_their_own_and_learn_from_their_whole_budget(tmp_path):
    path = tmp_path / "lines.jsonl"
    common = [
        "--tiny",
        "--steps",
        "2",
        "--points",
        "2",
        "--seeds",
        "1",
        "--policies",
        str(tmp_path / "policies"),
    ]
    assert learning.main([*common, "--only", "aipo-4", "distill", "--json", str(path)]) == 0
    lines = learning.finished(path)
    assert [line["system"] for line in lines] == ["aipo-4", "distill"]
    for line in lines:
        assert (line["steps"], line["rollouts"]) == (2, 2 * 32 * 8)
        points = [rollouts for rollouts, _ in curve_of(line)]
        assert points in ([0, 256, 512], [0, 512]), (
            "the round between gives way where the last is due already"
        )
