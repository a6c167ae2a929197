"""`Judge`: a language model behind an OpenAI-compatible chat API as a scorer."""

import asyncio
import contextlib
import hashlib
import json
import os
import string
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.errors import GraphError, WorldFailed
from dataflow.node import Rollout, Stream
from dataflow.scorer import Scorer
from dataflow.scoring.signature import shaped
from dataflow.system.native import cache_folder
from operators.rewards.foreign.adapting import messages_of
from operators.rewards.match import PackagedScorer, last_number

if TYPE_CHECKING:
    import httpx

_BUSY = (408, 409, 425, 429)
"""Statuses beside 500 and above that ask for patience."""
_SHOWN = 200
_CLIENTS: "weakref.WeakKeyDictionary[Any, dict[float, httpx.AsyncClient]]" = (
    weakref.WeakKeyDictionary()
)
"""By event loop, and by the seconds of one request."""


def last_number_said(text: str) -> float:
    """The last number in a text. ValueError where there is none.

    >>> last_number_said("It is mostly right: 7.5")
    7.5
    """
    number = last_number(text)
    if number is None:
        raise ValueError(
            f"the judge said no number: {text[:_SHOWN]!r}; ask it for one, or give Judge a verdict="
        )
    return float(number)


def default_cache() -> str:
    """The folder in which replies are kept where none is named."""
    return str(cache_folder() / "judge")


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Asks a model about each rollout, and reads a number out of what it says.

        judged = Judge(ask="Grade from 0 to 10 an answer to {prompt}: {completion}",
        model="gpt-5-mini")(rollouts)

    A request that gets no answer, or is refused because the judge is busy or broken, is made again,
    after pauses that grow or that the judge asks for; after `retries` of them the rollout has an
    error with the cause `world`, after `deadline_s` one with the cause `hung`, and never a reward
    of 0. What cannot be mended by waiting (a wrong key, an unknown model) is an error at once.

    >>> judge = Judge(ask="Is {completion} the same as {answer}? Say 0 or 1.", model="judge")
    >>> judge.scorer.name, sorted(judge.scorer.reads())
    ('reward', ['answer', 'completion'])
    """

    ask: str
    """What it is asked; {name} stands for the rollout's column. A prompt of chat messages is laid
    out as text."""
    model: str
    """As the server calls it."""
    verdict: Callable[[str], float | None] = last_number_said
    """From what it says to the reward; None: it does not apply; raises ValueError where it says
    none."""
    system: str = ""
    """Message of the system in front of it; empty: none."""
    url: str = "https://api.openai.com/v1"
    """Of the API, up to /chat/completions."""
    key_env: str = "OPENAI_API_KEY"
    """Environment variable that has the key, read when a request is made and written nowhere;
    unset: no key is sent."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """What else a request says, such as {"max_tokens": 512}; temperature is 0 unless it stands
    here."""
    request_s: float = 60.0
    """Seconds for one request."""
    deadline_s: float = 300.0
    """Seconds for one rollout, all its requests and pauses included."""
    retries: int = 6
    """Requests made again for one rollout, at most."""
    concurrency: int = 16
    """Requests at once."""
    cache: str | None = field(default_factory=default_cache)
    """Folder that keeps what was said, by everything that was asked, and spares asking again; None:
    none."""
    name: str = "reward"
    """Column that it writes."""

    def __call__(self, stream: Stream[Any]) -> Stream[Rollout]:
        """Apply it to rollouts."""
        judged: Stream[Rollout] = self.scorer(stream)
        return judged

    @cached_property
    def scorer(self) -> Scorer[..., Any]:
        """It as a scorer: what `dataflow swap` takes. GraphError for a question without a column,
        or a broken URL.
        """
        try:
            names = [
                name for _, name, _, _ in string.Formatter().parse(self.ask) if name is not None
            ]
        except ValueError as error:
            raise GraphError(
                f"Judge has a question that is no template ({error}); write a brace as two"
            ) from error
        columns = tuple(dict.fromkeys(names))
        if not columns or not all(name.isidentifier() for name in columns):
            raise GraphError(
                f"Judge asks {self.ask[:60]!r}, with the columns {list(columns)}; name one, such as"
                " {completion}"
            )
        if not self.url.startswith(("http://", "https://")):
            raise GraphError(
                f"Judge has url={self.url!r}, which is no address; give http://... or https://..."
            )

        async def judged(**values: Any) -> float | None:
            """A judge's verdict on a rollout."""
            return await _judged(self, values)

        return PackagedScorer(
            function=shaped(judged, dict.fromkeys(columns, Any), float),
            name=self.name,
            package="httpx",
            extra="judge",
            timeout_s=self.deadline_s,
            concurrency=self.concurrency,
            retries=self.retries,
        )


async def _judged(judge: Judge, values: Mapping[str, Any]) -> float | None:
    question = judge.ask.format(**{name: _as_text(value) for name, value in values.items()})
    messages = [{"role": "system", "content": judge.system}] if judge.system else []
    messages.append({"role": "user", "content": question})
    body = {"model": judge.model, "temperature": 0, **judge.params, "messages": messages}
    if judge.cache is None:
        return judge.verdict(await _said(judge, body))
    text = json.dumps([judge.url, body], sort_keys=True, ensure_ascii=False)
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
    async with _lock(digest):
        path = Path(judge.cache).expanduser() / digest[:2] / f"{digest}.json"
        if (recorded := _kept(path)) is not None:
            return judge.verdict(recorded)
        reply = await _said(judge, body)
        value = judge.verdict(reply)
        _keep(path, reply)
        return value


async def _said(judge: Judge, body: Mapping[str, Any]) -> str:
    """What the model answers. Raises WorldFailed where it may answer later, ValueError where it
    will not.
    """
    import httpx

    key = os.environ.get(judge.key_env, "") if judge.key_env else ""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    where = f"{judge.url.rstrip('/')}/chat/completions"
    try:
        reply = await _client(judge.request_s).post(where, json=body, headers=headers)
    except httpx.InvalidURL as error:
        raise ValueError(f"the judge's address {judge.url!r} is none: {error}; mend url=") from None
    except httpx.TransportError as error:
        raise WorldFailed(
            f"the judge at {judge.url} gave no answer: {type(error).__name__} {error}"
        ) from None
    text = reply.text.replace(key, "...") if key else reply.text
    if reply.status_code in _BUSY or reply.status_code >= 500:
        refusal = f"the judge at {judge.url} answered {reply.status_code}: {text[:_SHOWN]}"
        raise WorldFailed(refusal, after_s=_seconds(reply.headers.get("retry-after")))
    if reply.status_code != 200:
        raise ValueError(
            f"the judge at {judge.url} refused with {reply.status_code}: {text[:_SHOWN]}; look at"
            f" model=, params= and the key in ${judge.key_env}"
        )
    content: Any = None
    with contextlib.suppress(ValueError, LookupError, TypeError):
        content = reply.json()["choices"][0]["message"]["content"]
    if not isinstance(content, str):
        raise WorldFailed(f"the judge at {judge.url} answered without a text: {text[:_SHOWN]}")
    return content


def _client(request_s: float) -> "httpx.AsyncClient":
    import httpx

    clients = _CLIENTS.setdefault(asyncio.get_running_loop(), {})
    if request_s not in clients:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        clients[request_s] = httpx.AsyncClient(timeout=request_s, limits=limits)
    return clients[request_s]


_LOCKS: "weakref.WeakValueDictionary[tuple[int, str], asyncio.Lock]" = weakref.WeakValueDictionary()
"""By event loop and question: who asks the same waits for the answer of who asked first."""


def _lock(digest: str) -> asyncio.Lock:
    return _LOCKS.setdefault((id(asyncio.get_running_loop()), digest), asyncio.Lock())


def _as_text(value: Any) -> str:
    """A column's value in a question."""
    if not isinstance(value, str):
        return str(value)
    messages = messages_of(value)
    if messages is None:
        return value
    return "\n".join(f"{message['role']}: {message.get('content')}" for message in messages)


def _seconds(header: str | None) -> float | None:
    """Seconds of a Retry-After header; None where it is a date, or missing."""
    with contextlib.suppress(TypeError, ValueError):
        return float(header or "")
    return None


def _kept(path: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        reply = json.loads(path.read_text("utf-8"))["said"]
        return reply if isinstance(reply, str) else None
    return None


def _keep(path: Path, reply: str) -> None:
    """Write it down whole or not at all; a cache that cannot be written is none."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, delete=False, encoding="utf-8"
        ) as file:
            json.dump({"said": reply}, file)
        Path(file.name).replace(path)
