"""What operators that read trained weights are told of the graph around them, and what their edges
hold.
"""

from dataflow import Devices, Graph, Model, join, plan
from dataflow.planning.plan import bounds_of
from dataflow.planning.wiring import edges, graph_around
from dataflow.staleness import Bound
from dataflow.testing import FakeGenerator, FakePrompts, FakeTrainer
from operators import Logprobs, Values

POLICY, CRITIC = Model("policy"), Model("critic", head="value")


def graph(prompts_per_step: int = 512) -> Graph:
    """Generation runs up to 3 versions ahead; values are of the newest critic, proximal
    log-probabilities one older.
    """
    g = Graph("test")
    generator = FakeGenerator(model=POLICY, group_size=8)
    rollouts = generator(g.source(FakePrompts(size=None)))
    values, proximal = Values(CRITIC), Logprobs(POLICY, name="proximal_logprobs")
    both = join(values(rollouts), proximal(rollouts))
    actor = FakeTrainer(name="actor", model=POLICY, prompts_per_step=prompts_per_step)
    critic = FakeTrainer(name="learner", model=CRITIC, prompts_per_step=prompts_per_step // 2)
    actor(both)
    critic(both)
    g.feedback(actor.weights, generator, max_staleness=3)
    g.feedback(actor.weights, proximal, max_staleness=1)
    g.feedback(critic.weights, values, max_staleness=0)
    return g


def test_only_a_generators_feedback_bounds_how_far_generation_runs_ahead() -> None:
    assert bounds_of(graph()) == {"prompts": Bound(max_staleness=3, prompts_per_step=512)}


def test_a_reader_is_told_how_old_its_weights_may_be_and_what_their_trainer_consumes() -> None:
    g = graph()
    facts = {node: graph_around(g, plan(g, Devices(cpus=2)), node).feedback for node in g.operators}
    assert {node: bound for node, bound in facts.items() if bound is not None} == {
        "generator": Bound(max_staleness=3, prompts_per_step=512),
        "proximal_logprobs": Bound(max_staleness=1, prompts_per_step=512),
        "values": Bound(max_staleness=0, prompts_per_step=256),
    }


def test_every_edge_behind_the_generator_holds_all_that_may_be_in_flight() -> None:
    in_flight = (3 + 1) * 512 * 8
    behind = [edge for edge in edges(graph()) if edge.producer != "prompts"]
    assert len(behind) == 6 and all(edge.capacity_rows > in_flight for edge in behind)


def test_forward_operators_have_devices_of_their_own_and_may_run_as_replicas() -> None:
    made = plan(graph(), Devices(cpus=8), replicas={"values": 2, "proximal_logprobs": 3})
    assert [made.placements[node].replicas for node in ("values", "proximal_logprobs")] == [2, 3]
    workers = [
        made.placements[node].worker
        for node in ("generator", "values", "proximal_logprobs", "actor", "learner")
    ]
    assert len(set(workers)) == 5
    shared = plan(
        graph(), Devices(cpus=8, gpus=3), gpus={"generator": 2, "values": "generator", "actor": 1}
    )
    assert shared.placements["values"].gpus == shared.placements["generator"].gpus == (0, 1)
