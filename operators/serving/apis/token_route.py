"""The token route: ids in, ids and log-probabilities out, at the server's root."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from operators.serving.apis.api import Api, event, only_fields, usage
from operators.serving.calls import ServedCall
from operators.serving.errors import Bounds, bad
from operators.serving.requests import MOST_TOKENS, WISHES, Request, parse, set_aside
from operators.serving.text import Vocabulary

FIELDS: dict[str, Any] = {
    "model": None,
    "token_ids": None,
    "sampling_params": None,
    "cache_salt": None,
    "priority": None,
    "request_id": None,
    "stream": None,
    "return_token_ids": None,
    "features": ([], {}),
    "content_parts": ([],),
}
"""What a body may give; salt and priority change nothing here."""
SAMPLING: dict[str, Any] = {
    "max_tokens": None,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "repetition_penalty": None,
    "n": None,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "logprobs": (0, 1),
    "prompt_logprobs": (0,),
    "skip_special_tokens": (False,),
    "spaces_between_special_tokens": None,
    "detokenize": None,
    "include_stop_str_in_output": None,
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "output_kind": None,
    "routed_experts_prompt_start": None,
    **WISHES,
}
_OWN = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
)


def parse_tokens(body: Any, bounds: Bounds) -> Request:
    """The call that a body asks for. Raises ApiError."""
    fields = only_fields(body, FIELDS)
    sampling = only_fields(fields.get("sampling_params", {}), {**SAMPLING, **set_aside(bounds)})
    ids = fields.get("token_ids")
    if (
        not isinstance(ids, list)
        or not ids
        or not all(type(token) is int and token >= 0 for token in ids)
    ):
        raise bad(
            "token_ids",
            f"'token_ids' must be a list of ids; found {str(ids)[:80]!r}; give at least one",
        )
    knobs = {name: sampling[name] for name in _OWN if name in sampling}
    request = parse(
        "completion",
        {
            "max_tokens": MOST_TOKENS,
            **knobs,
            "model": fields.get("model"),
            "prompt": ids,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": fields.get("stream", False),
        },
        bounds,
    )
    return request.with_(max_tokens=None if "max_tokens" not in sampling else request.max_tokens)


def whole_tokens(call: ServedCall, _: Vocabulary) -> dict[str, Any]:
    """The answer of a call that is over."""
    choices = []
    for choice in call.choices:
        ids, values = choice.tokens.ids.tolist(), [float(value) for value in choice.tokens.logprobs]
        content: list[dict[str, Any]] = [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in zip(ids, values, strict=True)
        ]
        choices.append(
            {
                "index": choice.index,
                "token_ids": ids,
                "logprobs": {"content": content},
                "finish_reason": choice.finish_reason,
                "versions": choice.tokens.versions.tolist(),
            }
        )
    return {
        "request_id": call.request_id,
        "model": call.request.model,
        "choices": choices,
        "prompt_token_ids": list(call.parts[0].group.prompt_tokens),
        "usage": usage(call),
    }


class ToldTokens:
    """The whole answer as one event."""

    def __init__(self, call: ServedCall, vocabulary: Vocabulary) -> None:
        """Nothing sent yet."""
        self._call, self._vocabulary = call, vocabulary

    def new(self) -> Iterator[str]:
        """Nothing before the end."""
        yield from ()

    def last(self) -> Iterator[str]:
        """The answer."""
        yield event(whole_tokens(self._call, self._vocabulary))


TOKEN_ROUTE = Api("/inference/v1/generate", parse_tokens, whole_tokens, ToldTokens)
