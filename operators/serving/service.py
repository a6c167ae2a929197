"""What stands behind the routes: prompts to tokens, calls to the engine's thread, ended calls to
rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import structlog
import xxhash

from dataflow.errors import RunError
from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.chat.chat_format import ChatError, ChatFormat
from operators.chat.chat_template import ChatTemplate, ids_behind, mixed_stop
from operators.chat.conversation import Past
from operators.chat.tool_calls import call_opening, format_of
from operators.engine.interface import ABORTED
from operators.serving.calls import CallPrompt, Choice, ServedCall
from operators.serving.errors import CALL_TIMEOUT_S, ApiError, Bounds, Budget, bad, too_long
from operators.serving.requests import Request
from operators.serving.rows import GroupIds, rows_of
from operators.serving.serve import Overloaded
from operators.serving.sessions import Prompt, TurnStore, chat_prompt, text_prompt
from operators.serving.text import Transcript, Vocabulary
from operators.serving.work import Draws, News, Work

OnRollout = Callable[[pa.RecordBatch], None]


class Service:
    """Serves one model; every method is called on the event loop.

    consumes: requests; news from the engine's thread, handed over to the loop
    produces: calls, and for each of their prompts one batch of rows, before the caller hears that
        it is over
    waits for: nothing
    """

    def __init__(
        self,
        thread: Draws,
        tokenizer: Any,
        *,
        model: str,
        ends: frozenset[int],
        make_sampling: Callable[..., Any],
        make_stop: Callable[..., Any],
        on_rollout: Sequence[OnRollout] = (),
        numbers: GroupIds | None = None,
        vocabulary: int | None = None,
        call_timeout_s: float = CALL_TIMEOUT_S,
        most_turns: int = 1024,
        past: Past = "sampled",
        bounds: Bounds | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Serve `model`, the name that callers use.

        Args:
            tokenizer: for this thread alone; the engine's stop strings have another.
            ends: tokens at which the engine ends a rollout.
            make_sampling: `operators.engine.sampler.Sampling`.
            make_stop: from stop strings to what the engine ends rollouts by, or None.
            on_rollout: hear the rows of every prompt whose rollouts have ended.
            numbers: hands out group ids; a `RolloutFile` knows which are free.
            vocabulary: tokens that the model knows; None: those of the tokenizer.
            call_timeout_s: a call that takes longer is ended, and recorded with an error.
            most_turns: how many earlier turns a prompt may go on from.
            past: what becomes of turns that the chat template writes otherwise once they are past.
            bounds: what a call may ask for.
            chat_template_kwargs: options of the chat template, where a call does not say others.
        """
        self.bounds = bounds or Bounds()
        self.reading = Budget(self.bounds.bodies_bytes)
        self.thread, self.model, self.call_timeout_s = thread, model, call_timeout_s
        self.vocabulary = Vocabulary(tokenizer)
        self.started_s = int(time.time())
        self.recorded = 0
        self._make_sampling, self._make_stop = make_sampling, make_stop
        self._on_rollout, self._numbers = tuple(on_rollout), numbers or GroupIds()
        self._turns, self._past = TurnStore(most_turns), past
        self._log = structlog.get_logger()
        options = chat_template_kwargs or {}
        self._template = ChatTemplate(tokenizer, **options) if tokenizer.chat_template else None
        self._form = self._form_of(tokenizer, options)
        self._turn_stops = () if self._form is None else self._form.stops
        """Texts that end a turn in the chat template, where no token does."""
        self._turn_ends = tuple(() if self._form is None else self._form.ends - ends)
        """Tokens that end one, and at which the engine does not end any rollout."""
        self._ends = ends.union(self._turn_ends)
        self.calls = None if self._form is None else format_of(self._form)
        """How the model writes calls of tools; None where that is not known."""
        if self._form is not None and self.calls is not None:
            self.vocabulary.show(self._form.calls or "")
        self._calls: weakref.WeakSet[ServedCall] = weakref.WeakSet()
        self._tokens = vocabulary or len(tokenizer)

    def begin(self, request: Request, session: str | None) -> ServedCall:
        """Start a call. Raises ApiError where it cannot be: 400, 404 (model), 429 (overload), 503
        (shutting down).
        """
        self.check_room(max(1, len(request.prompts)))
        if session is not None and len(session) > self.bounds.name_characters:
            raise bad(
                "user",
                f"a session's name has at most {self.bounds.name_characters} characters;"
                " shorten it",
            )
        self.check_model(request.model)
        if request.alternatives and not hasattr(self.thread.engine, "alternatives"):
            raise bad(
                "top_logprobs" if request.kind == "chat" else "logprobs",
                f"alternatives are not recorded by this engine; found {request.alternatives} asked"
                " for; ask for 0",
                "unsupported_parameter",
            )
        try:
            sampling = self._make_sampling(**request.knobs)
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        stop = self._stops_of(request)
        kind = "chatcmpl" if request.kind == "chat" else "cmpl"
        prompts = self._prompts(request, session)
        call = ServedCall(
            request=request,
            session=session,
            request_id=f"{kind}-{secrets.token_hex(12)}",
            created_ms=time.time_ns() // 1_000_000,
            parts=[self._part(request, place, prompt) for place, prompt in enumerate(prompts)],
            ends=self._ends,
            finished=self._over,
        )
        self._check_room(call)
        works = [self._work(call, part, sampling, stop) for part in call.parts]
        with _refused():
            self.thread.submit(works)
        self._calls.add(call)
        return call

    def _stops_of(self, request: Request) -> Any:
        """What ends its rollouts beside the engine's own; None: nothing. Raises ApiError."""
        for text in request.stop:
            if (fault := mixed_stop(text, self.vocabulary.special)) is not None:
                raise bad("stop", fault, "unsupported_parameter")
        texts, tokens = request.stop, request.stop_tokens
        if request.kind == "chat":
            texts, tokens = (*texts, *self._turn_stops), (*tokens, *self._turn_ends)
        return self._make_stop(texts, tokens) if texts or tokens else None

    def check_room(self, prompts: int = 1) -> None:
        """Whether the engine would take so many more. Raises ApiError: 429, 503."""
        with _refused():
            self.thread.check_room(prompts)

    def knows(self, model: str) -> bool:
        """Whether it serves a model of this name."""
        return model == self.model

    def check_model(self, model: str) -> None:
        """Whether it serves a model of this name. Raises ApiError (404)."""
        if not self.knows(model):
            raise ApiError(
                404,
                f"there is no model {model!r} here; found {self.model!r} only; send that name",
                param="model",
                code="model_not_found",
            )

    def forget(self, session: str) -> None:
        """Forget a session's turns; later calls start afresh."""
        self._turns.forget(session)

    def end(self, call: ServedCall, why: str) -> None:
        """Cancel the rest of a call; its rows say why."""
        for part in call.parts:
            if part.work is not None and not part.is_over:
                self.thread.cancel(part.work, why)

    def end_all(self, why: str) -> None:
        """Give up every call that is under way."""
        for call in list(self._calls):
            self.end(call, why)

    def count(self, request: Request, session: str | None) -> int:
        """How many tokens a call's prompts have. Raises ApiError."""
        return sum(len(prompt.tokens) for prompt in self._prompts(request, session))

    def _form_of(self, tokenizer: Any, options: Mapping[str, Any]) -> ChatFormat | None:
        """None where the chat template has no recognisable delimiters: its chats continue by their
        text.
        """
        try:
            return ChatFormat(tokenizer, **options)
        except ChatError as error:
            self._log.info("conversations go on by their text", why=str(error))
            return None

    def _prompts(self, request: Request, session: str | None) -> list[Prompt]:
        """As tokens, which go on with those of earlier turns. Raises ApiError."""
        if request.kind == "chat":
            return [self._chat_prompt(request, session)]
        prompts = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                self._check_size("prompt", prompt)
                prompts.append(
                    text_prompt(self.vocabulary, self._turns, prompt, session=session, chat=False)
                )
            else:
                self._check_tokens("prompt", prompt)
                prompts.append(Prompt(prompt, self.vocabulary.decode(prompt, special=True)))
        return prompts

    def _chat_prompt(self, request: Request, session: str | None) -> Prompt:
        beginning = ({"role": "assistant", "content": request.begun},) if request.begun else ()
        shown = json.dumps([*request.messages, *beginning], ensure_ascii=False)
        self._check_size("messages", shown)
        self._check_size("tools", json.dumps(request.tools))
        text = self._rendered(request)
        self._check_size("messages", text)
        begun = self._begun(request.must_call)
        if self._form is None:
            prompt = text_prompt(self.vocabulary, self._turns, text, session=session, chat=True)
            return replace(prompt, shown=shown)
        try:
            prompt = chat_prompt(
                self._form.given(request.options),
                self._turns,
                request.messages,
                request.tools,
                session=session,
                past=self._past,
                begins=request.begun,
            )
        except ChatError as error:
            raise bad("messages", str(error)) from error
        return replace(prompt, shown=shown, tokens=(*prompt.tokens, *begun), begun=begun)

    def _begun(self, must_call: Sequence[str]) -> tuple[int, ...]:
        """Tokens that a turn is made to begin with in which one of these tools has to be called.
        Raises ApiError where the chat template has none.
        """
        if not must_call:
            return ()
        try:
            if self._form is None:
                why = "no call can be forced with this chat template; its delimiters were not found"
                raise ChatError(f'{why}; send tool_choice="auto"')
            return tuple(ids_behind(self._form.tokenizer, call_opening(self._form, must_call)))
        except ChatError as error:
            raise bad("tool_choice", str(error), "unsupported_parameter") from error

    def _check_size(self, param: str, text: str) -> None:
        """Refuse a text that is far too long to be made tokens of."""
        most = self.bounds.characters_per_token * self.thread.engine.context_tokens
        if len(text) > most:
            raise too_long(
                f"'{param}' is too long: it has {len(text)} characters, and a context of "
                f"{self.thread.engine.context_tokens} tokens takes at most {most}; shorten it",
                param,
            )

    def _check_tokens(self, param: str, tokens: Sequence[int]) -> None:
        if tokens and max(tokens) >= self._tokens:
            raise bad(
                param,
                f"the prompt has token {max(tokens)}; found a model of {self._tokens} tokens; leave"
                " it out",
                "unknown_token",
            )

    def _rendered(self, request: Request) -> str:
        """The messages as the tokenizer's chat template lays them out."""
        if self._template is None:
            raise ApiError(
                400,
                f"model {self.model!r} has no chat template; found none in its tokenizer; call"
                " /v1/completions, or start the server with --chat-template FILE",
                code="no_chat_template",
            )
        try:
            template = self._template.given(request.options)
            text = template.render(request.messages, request.tools)
            ignored = bool(request.tools) and text == template.render(request.messages)
        except ChatError as error:
            raise bad("messages", str(error)) from error
        if ignored:
            raise bad(
                "tools",
                "the chat template has no place for tools; found some; leave them out",
                "unsupported",
            )
        return template.headed(text, request.begun) + request.begun

    def _part(self, request: Request, place: int, prompt: Prompt) -> CallPrompt:
        param = "messages" if request.kind == "chat" else "prompt"
        if not prompt.tokens:
            raise bad(
                param, "the prompt is empty: the tokenizer made 0 tokens of it; give it a text"
            )
        self._check_tokens(param, prompt.tokens)
        first, reads = place * request.n, self.calls if request.tools else None
        choices = [
            Choice(
                first + i,
                Transcript(self.vocabulary, request.stop, prompt.begun, self._turn_stops),
                calls=reads,
                tools=request.tools,
                first_call=_first_call(prompt.tokens, first + i),
            )
            for i in range(request.n)
        ]
        return CallPrompt(
            group_id=self._numbers.take(request.n),
            prompt=prompt,
            seeds=[_seed(request.seed, place, position) for position in range(request.n)],
            choices=choices,
        )

    def _check_room(self, call: ServedCall) -> None:
        """Refuse a call that the context has no room for; it is recorded, as any rollout that came
        to nothing.
        """
        room = self.thread.engine.context_tokens
        for part in call.parts:
            size, most_new = len(part.prompt.tokens), call.request.max_tokens or 1
            if size + most_new > room:
                error = too_long(
                    f"the prompt is too long: it has {size} tokens and {most_new} are to be"
                    " written,"
                    f" but the context has room for {room}; shorten it, or lower max_tokens",
                    "messages" if call.request.kind == "chat" else "prompt",
                )
                for call_part in call.parts:
                    for position in range(len(call_part.choices)):
                        call.hear(
                            call_part,
                            News(position, RolloutTokens.joined(()), ABORTED, error.message),
                        )
                raise error

    def _work(self, call: ServedCall, part: CallPrompt, sampling: Any, stop: Any) -> Work:
        post = asyncio.get_running_loop().call_soon_threadsafe

        def tell(news: News) -> None:
            post(call.hear, part, news)

        size = len(part.prompt.tokens)
        room = self.thread.engine.context_tokens
        part.work = Work(
            prompt=np.asarray(part.prompt.tokens, np.int64),
            limit=room if call.request.max_tokens is None else size + call.request.max_tokens,
            seeds=part.seeds,
            session=call.session,
            most=call.request.max_tokens,
            sampling=sampling,
            stop=stop,
            tell=tell,
            streams=call.request.stream,
            alternatives=call.request.alternatives,
        )
        return part.work

    def _over(self, call: ServedCall, part: CallPrompt) -> None:
        """All rollouts of a prompt have ended: record them, and remember what may be gone on
        from.
        """
        for turn in call.turns(part, self.vocabulary):
            self._turns.add(turn)
        rows = rows_of(call, part)
        self.recorded += rows.num_rows
        for hear in self._on_rollout:
            try:
                hear(rows)
            except Exception:
                self._log.exception("rollouts could not be recorded", request=call.request_id)
                raise


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """The engine thread's refusal of a call, as an error for the caller."""
    try:
        yield
    except Overloaded as error:
        raise ApiError(429, str(error), code="overloaded") from error
    except RunError as error:
        raise ApiError(503, str(error), code="shutting_down") from error


def _seed(seed: int | None, place: int, position: int) -> int:
    """A rollout's seed, int64: the same for the same call where one was asked for, else by
    chance.
    """
    if seed is None:
        return secrets.randbits(63)
    return xxhash.xxh3_64_intdigest(f"{seed}/{place}/{position}".encode()) - (1 << 63)


def _first_call(prompt: Sequence[int], index: int) -> int:
    """Number of the first call of a tool in a choice: the same for the same prompt, another at each
    turn of it.
    """
    ids = np.asarray(prompt, np.int64).tobytes()
    return int(xxhash.xxh3_64_intdigest(f"{index}/".encode() + ids) % 10**5)
