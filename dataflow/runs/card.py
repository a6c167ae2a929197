"""The card of an exported data set: README.md with the configuration that `datasets.load_dataset`
reads.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataflow.display.formatting import clean
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import described
from dataflow.records import (
    ADVANTAGE,
    COMPLETION,
    DROP_REASON,
    ERROR,
    FINISH_REASON,
    GROUP_ID,
    GROUP_SIZE,
    LOGPROBS,
    MASK,
    MIN_VERSION,
    NEW_LOGPROBS,
    POSITION,
    PROMPT,
    PROMPT_ID,
    ROLLOUT_ID,
    ROUND_SIZE,
    SAMPLING_MASK,
    TEMPERATURE,
    TOKENS,
    TRAINING_ROW,
    VERSIONS,
)

_SAID: Mapping[str, str] = {
    "outcome": "trained, evaluated, dropped, or in flight when it was exported",
    "node": "the trainer or the evaluation that read it",
    "source": "where its prompt came from",
    "step": "that trained it; of an evaluation, after which it was drawn",
    "staleness": "versions that its oldest token was behind the trainer",
    "staleness_generating": "those of them that were made while it was generated",
    "staleness_waiting": "those that were made while it waited to be trained",
    NEW_LOGPROBS: (
        "what the trainer computed before its step; exp(new_logprobs - logprobs) is the importance"
        " ratio"
    ),
    GROUP_ID: "issue number of the prompt within its source",
    PROMPT_ID: "which task it is, the same in every epoch",
    PROMPT: "text, or chat messages as JSON",
    GROUP_SIZE: "rollouts asked for; 0: the generator's own number",
    MIN_VERSION: "not begun under older weights",
    ROUND_SIZE: "prompts of the evaluation round; 0: not of one",
    ROLLOUT_ID: "group_id * group size + position",
    POSITION: "within the group",
    COMPLETION: "what the policy wrote",
    TOKENS: "ids of prompt and completion",
    MASK: "true where the policy chose the token",
    LOGPROBS: "of the distribution that was sampled from; 0 where mask is false",
    VERSIONS: "weights that each token was drawn under; -1 where mask is false",
    FINISH_REASON: "stop, length or error",
    ERROR: "null, or what failed",
    ADVANTAGE: "what the trainer weighed it with",
    SAMPLING_MASK: "ids that truncation left, by token",
    TEMPERATURE: "at which it was sampled",
    DROP_REASON: "why its group was given up",
    TRAINING_ROW: "which of the sequences that the policy saw each token is of",
    "chosen": "completion of the best rollout of the group",
    "rejected": "completion of the worst",
    "chosen_reward": "its figure",
    "rejected_reward": "its figure",
    "chosen_rollout_id": "its number in the run",
    "rejected_rollout_id": "its number in the run",
}


@dataclass(frozen=True)
class CardColumn:
    """One column of the data set."""

    name: str
    kind: str
    """Its Arrow type."""


def card(
    folder: RunFolder,
    rows: Mapping[str, int],
    columns: Sequence[CardColumn],
    *,
    pairs: bool,
    notes: Sequence[str],
) -> str:
    """The text of README.md. rows: by split."""
    graph, config = described(folder)
    name, title = folder.path.name, "Preference pairs" if pairs else "Rollouts"
    node_names = {node["name"] for node in graph.get("nodes", ())}
    head = ["---", "configs:", "- config_name: default", "  data_files:"]
    for split in rows:
        head += [f"  - split: {split}", f"    path: {json.dumps(f'data/{split}-*.parquet')}"]
    head += ["tags:", "- reinforcement-learning", "- dataflow-rl", "---", ""]
    lines = [
        f"# {title} of {_text(name)}",
        "",
        (
            "Written by `dataflow export` from a run of the graph"
            f" `{_code(graph.get('name', '?'))}`,"
            f" {', '.join(f'{count:,} rows {split}' for split, count in rows.items())}."
        ),
        "",
        *(f"- {_text(note)}" for note in notes),
        *([""] if notes else []),
        "```python",
        "from datasets import load_dataset",
        "",
        'data = load_dataset("PATH/OF/THIS/FOLDER")',
        "```",
        "",
        (
            f"Seed {config.get('seed')}, bound of staleness"
            f" {_text(json.dumps(config.get('max_staleness')))}."
        ),
        "",
        "| column | type | is |",
        "|---|---|---|",
    ]
    for column in columns:
        default = (
            f"what '{column.name}' made"
            if column.name in node_names
            else "of the prompts, or added by an operator"
        )
        meaning = _SAID.get(column.name, default)
        lines.append(f"| `{_code(column.name)}` | `{_code(column.kind)}` | {_text(meaning)} |")
    if "untrained" in rows:
        lines += [
            "",
            (
                "A run keeps rollouts of dropped groups for a while only: `untrained` has those"
                " that were still there, and those in flight, without the columns that scorers"
                " would have added."
            ),
        ]
    return "\n".join([*head, *lines]) + "\n"


def _code(text: object) -> str:
    """Within backquotes in a cell of a table."""
    return clean(text).replace("`", "'").replace("|", "\\|")


def _text(text: object) -> str:
    """Text that is no markup."""
    return "".join(f"\\{char}" if char in "\\`*_[]<>#|" else char for char in clean(text))
