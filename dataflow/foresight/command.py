"""`--foresee`: devices and lengths as text, what is foreseen of a graph as text."""

from dataflow.errors import GraphError
from dataflow.foresight.foresee import PROMPT_TOKENS, SIGMA, Workload, best_split, foresee
from dataflow.foresight.report import lines
from dataflow.foresight.spec import read_devices
from dataflow.foresight.steps import CONSTANTS
from dataflow.planning.sharing import Wishes
from dataflow.structure import Structure


def told(
    graph: Structure, devices: str, *, gpus: Wishes | str | None, lengths: str, steps: int | None,
    constants: str = CONSTANTS[0],
) -> str:  # fmt: skip
    """What a graph takes on devices that are named as `read_devices` has them.

    gpus: devices by node; empty: dealt out for the shortest step. lengths: `mean=800,prompt=200,sigma=0.8`, each of
    them optional. constants: one of `CONSTANTS`. GraphError for what cannot be read or foreseen."""
    room, workload = read_devices(devices), read_workload(lengths)
    if isinstance(gpus, str):
        raise GraphError(
            "operators that share their devices are not foreseen yet; give each its own, or leave gpus out"
        )
    if gpus:
        made, dealt = foresee(graph, room, gpus=gpus, workload=workload, steps=steps, constants=constants), ""
    else:
        chosen, made = best_split(graph, room, workload=workload, steps=steps, constants=constants)
        dealt = ",".join(f"{node}={count}" for node, count in chosen.items())
    return lines(made) + (
        f"\nof all ways to deal the devices out, the shortest step has --gpus {dealt}" if dealt else ""
    )


def read_workload(text: str) -> Workload:
    """`mean=800,prompt=200,sigma=0.8`, in tokens. GraphError for what cannot be read."""
    names = {"mean": "mean_tokens", "prompt": "prompt_tokens", "sigma": "sigma"}
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[names[name.strip()]] = number = float(value)
        except (KeyError, ValueError):
            raise GraphError(
                f"lengths to foresee with are {text!r}, which cannot be read at {part!r}; write them as "
                f"mean=800,prompt={PROMPT_TOKENS:g},sigma={SIGMA:g}"
            ) from None
        if not 0 <= number < float("inf"):
            raise GraphError(f"lengths to foresee with are {text!r}, but {part!r} is no length; give 0 or more")
    return Workload(**found)
