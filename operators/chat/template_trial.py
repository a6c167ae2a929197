"""Whether conversations can be made with the chat template in a model's folder, told before a run
starts anything.

Reading a tokenizer imports torch, which whoever starts a run does without: a process of its own
does it.
"""

from __future__ import annotations

import json
import subprocess
import sys

from dataflow.model import Model
from dataflow.model_files import folder_here, template_fault
from dataflow.system import child

TRIAL_S = 50.0
"""For the tokenizer to be read and its template to be tried; then the worker finds out."""


def delimiter_fault(model: Model) -> str | None:
    """Why a model's chat template gives no conversations of token ids, in three parts; None where
    it does, or where this machine's files do not tell.
    """
    if folder_here(model.source) is None:
        return None
    if (fault := template_fault(model)) is not None:
        return fault
    model_json = json.dumps({"source": model.source, "trust_remote_code": model.trust_remote_code})
    trial = child.program(__name__, model_json, words=True, stdin=subprocess.DEVNULL)
    trial.end(TRIAL_S)
    try:
        fault = json.loads(trial.last_words.rpartition("\n")[2])
    except ValueError:
        return None
    return None if fault is None else str(fault)


def main(model_json: str) -> None:
    """Print the fault as JSON, null for none: the last line, as libraries may print others."""
    from operators.chat.chat_format import ChatError, ChatFormat
    from operators.models.loading import load_tokenizer

    child.die_with_parent()
    fault = None
    try:
        ChatFormat(load_tokenizer(Model(**json.loads(model_json))))
    except ChatError as error:
        fault = str(error)
    print(json.dumps(fault), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
