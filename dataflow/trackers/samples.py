"""A table of some rollouts of one step: the best, the worst, some by chance, some with an error."""

from collections.abc import Mapping
from typing import Any

from dataflow.folder.run_folder import RunFolder
from dataflow.records import COMPLETION, ERROR, FINISH_REASON, PROMPT
from dataflow.runs.examples import examples_of, scores_of
from dataflow.runs.texts import visible
from dataflow.runs.which import TRAINED, Part, trainers_of
from dataflow.system.files import RunFolderError
from dataflow.trackers.tracker import TEXT, RolloutTable

EACH = 3
_FRONT, _BACK = ("step", "why"), (FINISH_REASON, ERROR, PROMPT, COMPLETION)


def table_of(folder: RunFolder, node: str, step: int) -> RolloutTable | None:
    """Of what a step trained; None where its rollouts are not in this folder, or not any more."""
    trainers = trainers_of(folder.read_json("graph.json"), folder.read_json("config.json"))
    path = folder.rollouts_of(node if len(trainers) > 1 else None).step_file(step)
    if not path.is_file():
        return None
    try:
        found = examples_of(
            [Part(path=path, outcome=TRAINED, node=node, source=None, step=step)], each=EACH
        )
    except (RunFolderError, FileNotFoundError):
        return None
    kinds = {
        "best": found.best,
        "worst": found.worst,
        "by chance": found.random,
        "with an error": found.failed,
    }
    rows = [(why, row) for why, chosen in kinds.items() for row in chosen]
    scores = list(dict.fromkeys(name for _, row in rows for name in scores_of(row)))
    return RolloutTable(
        node=node,
        step=step,
        columns=[*_FRONT, *scores, *_BACK],
        rows=[[step, why, *(_cell(row, name) for name in (*scores, *_BACK))] for why, row in rows],
    )


def _cell(row: Mapping[str, Any], name: str) -> Any:
    value = row.get(name)
    return visible(value, TEXT) if isinstance(value, str) else value
