"""What a forkserver forks for a planned graph: the workers, and what they need to find when they
start.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dataflow.agent.forkserver import Main
from dataflow.graph import Graph
from dataflow.planning.plan import Plan
from dataflow.worker import worker


@dataclass(frozen=True)
class ForkWorkload:
    """Functions and values that are inherited by a fork, never sent."""

    main: Main
    environment: Mapping[str, str]
    """Set before anything heavy is imported."""
    preload: Callable[[], None]

    @classmethod
    def of(cls, graph: Graph, plan: Plan) -> "ForkWorkload":
        """The workers of a plan."""
        threads = max((placement.threads for placement in plan.placements.values()), default=1)
        return cls(
            main=lambda plain: worker.main(graph, plan, plain),
            environment=worker.environment(threads),
            preload=lambda: worker.preload(graph),
        )
