"""How many processes share out one replica of an operator, and how often it may run."""

from dataflow.errors import GraphError
from dataflow.node import Generate, Operator


def ranks_of(operator: Operator, gpus: int, wish: int | None, one_process: bool) -> int:
    """Processes that share out one replica of an operator; its worker starts all but the first."""
    name, traits = operator.name, operator.traits
    unit = traits.tensor_parallel * traits.dp_replicate
    if not operator.trains:
        if wish is not None:
            raise GraphError(
                f"'{name}' is given {wish} ranks, but it trains nothing; ranks= is for trainers;"
                " give it replicas=, or its own tensor_parallel"
            )
        if gpus % unit:
            raise GraphError(
                f"'{name}' is given {gpus} GPUs, but each of its replicas takes {unit}"
                f" (tensor_parallel); give it a multiple of {unit}, or another tensor_parallel"
            )
        if one_process and unit > 1 and not isinstance(operator, Generate):
            raise GraphError(
                f"'{name}' has tensor_parallel={unit}, but a run in one process has one of"
                " everything; use tensor_parallel=1, or run in processes"
            )
        return unit
    if wish is not None and (wish < 1 or (gpus and wish != gpus)):
        raise GraphError(
            f"'{name}' is given {wish} ranks{f' and {gpus} GPUs' if gpus else ''}; give it 1 rank"
            " or more, and on GPUs leave ranks= out: each GPU is one"
        )
    ranks = gpus or (unit if wish is None else wish)
    if ranks % unit:
        knobs = {"dp_replicate": traits.dp_replicate, "tensor_parallel": traits.tensor_parallel}
        has = {knob: size for knob, size in knobs.items() if size > 1}
        raise GraphError(
            f"'{name}' runs on {ranks} ranks, but has"
            f" {' and '.join(f'{knob}={size}' for knob, size in has.items())}, which does not"
            f" divide them; give it a multiple of {unit} ranks, or another {' or '.join(has)}"
        )
    if one_process and ranks > 1:
        raise GraphError(
            f"'{name}' is to run on {ranks} ranks, but a run in one process has one of everything;"
            " use tensor_parallel=1, dp_replicate=1 and 1 rank, or run in processes"
        )
    return ranks


def check_replicas(operator: Operator, count: int) -> None:
    """Refuse a number of replicas that an operator cannot have."""
    if count < 1 or (count > 1 and (operator.trains or operator.light)):
        raise GraphError(
            f"'{operator.name}' cannot run as {count} replicas; give 1 or more, to generators and"
            " forward operators only"
        )


def check_scaled(operator: Operator, count: int, has: int) -> None:
    """Refuse a number of replicas that an operator cannot have from some step of a run on. has:
    those that it has.
    """
    check_replicas(operator, count)
    if count != has and isinstance(operator, Generate) and operator.asks is not None:
        raise GraphError(
            f"'{operator.name}' is an episode of {has} replicas, and cannot have {count} from some"
            f" step on, as its generator knows from the start whom it answers; give {count}"
            " replicas at the start of a run, or more in its pool: @episode(processes=...),"
            " agent(concurrency=...)"
        )
