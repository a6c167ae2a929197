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
    """Why no conversation of token ids can be made with the template of a model, in three parts;
    None where one can be, or where that cannot be told from this machine's files.
    """
    if folder_here(model.source) is None:
        return None
    if (fault := template_fault(model)) is not None:
        return fault
    asked = json.dumps({"source": model.source, "trust_remote_code": model.trust_remote_code})
    nobody = subprocess.DEVNULL
    trial = child.program(
        __name__, asked, stdin=nobody, stdout=subprocess.PIPE, stderr=nobody, text=True
    )
    try:
        said, _ = trial.communicate(timeout=TRIAL_S)
        found: str | None = json.loads(said.splitlines()[-1])
        return found
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return None
    finally:
        child.end(trial, 0.0)
        assert trial.stdout is not None, "it is a pipe"
        trial.stdout.close()


def main(asked: str) -> None:
    """Print the fault as JSON, null for none: the last line, as libraries may print others."""
    from operators.chat.chat_format import ChatError, ChatFormat
    from operators.models.loading import load_tokenizer

    child.die_with_parent()
    found = None
    try:
        ChatFormat(load_tokenizer(Model(**json.loads(asked))))
    except ChatError as error:
        found = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
