"""What a turn begins with that has to call a tool: the template's own text, up to what the policy
may choose.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from operators.chat.chat_format import ChatError, ChatFormat, common
from operators.chat.tool_calls import format_of

_ARGUMENTS = re.compile(r'[ {<"]*$')
"""With which arguments may begin: the policy writes it, so that it is cut into tokens as it
likes."""
_NAME, _OTHER_ID = "xqf3", "zqcall008"


def call_opening(form: ChatFormat, names: Sequence[str]) -> str:
    """What stands between the generation prompt and the first thing that differs between calls of
    these tools: the name of one of several, the arguments of a single one.

    Raises ChatError for a template whose calls are not read here, or have no such beginning.
    """
    if format_of(form) is None:
        raise _refused(form, "it writes calls in no form that is known here")
    name = names[0] if len(names) == 1 else _NAME
    laid_out = [form.calling(name, {"xqp5": "xqg7"}), form.calling(name, {}, _OTHER_ID)]
    if not all(text.startswith(form.opening) for text in laid_out):
        raise _refused(
            form, f"a generation prompt ends with {form.opening!r}, which stands before no call"
        )
    full, bare = (text.removeprefix(form.opening) for text in laid_out)
    shared = full[: common(full, bare)]
    before, hit, behind = shared.partition(name)
    if not before or not hit:
        raise _refused(
            form,
            f"calls of '{name}' begin alike with {shared[:40]!r} alone, which does not name it",
        )
    return before if len(names) > 1 else before + hit + _ARGUMENTS.sub("", behind)


def _refused(form: ChatFormat, reason: str) -> ChatError:
    return ChatError(
        f"no call can be forced with the chat template of '{form.name}'; found that {reason}; "
        f'send tool_choice="auto", and ask for the call in a message'
    )
