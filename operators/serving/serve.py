"""A server put together: the thread that drives the engine, the record, the routes, on an
address that it may be bound to."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ipaddress
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from dataflow.errors import DeadlineError, GraphError, RunError
from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.engine.interface import ABORTED, BROKEN, DecodingEngine, PromptStart
from operators.serving.work import News, Work

if TYPE_CHECKING:
    import uvicorn

    from operators.engine.build import BuiltEngine
    from operators.engine.interface import EndedRollout
    from operators.serving.rows import RolloutLog
    from operators.serving.service import OnRollout, Service

PAUSE = 4
"""Between two looks at the rollouts that stream passes at least this many times the time that a
look takes."""


@dataclass(frozen=True)
class _Update:
    version: int
    apply: Callable[[Mapping[str, Any]], None]
    done: Future[None]


class Overloaded(RunError):
    """More calls are waiting than the queue holds."""


class EngineThread:
    """Decodes for many callers on one thread.

    consumes: works (`submit`), cancellations (`cancel`), weights (`update`), from any thread, by
        one queue
    produces: news of each rollout, by `Work.tell`
    waits for: the queue, while no rollout is live and none can start, `idle_s` at a time
    unblocked by: any of the above, and `close`
    """

    def __init__(
        self,
        engine: DecodingEngine,
        *,
        most_waiting: int = 256,
        prefill_tokens: int = 4096,
        stream_s: float = 0.02,
        idle_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over an engine, which nothing else may call from now on.

        Args:
            most_waiting: prompts that wait to be started; more are refused.
            prefill_tokens: prompt tokens after which no more prompts start in the same step.
            stream_s: seconds between two looks at the rollouts that stream, at least; 0: after
                every step.
        """
        self.engine = engine
        self.failure: str | None = None
        self._clock = clock
        self._most_waiting, self._prefill_tokens = most_waiting, prefill_tokens
        self._stream_s, self._idle_s = stream_s, idle_s
        self._inbox: queue.SimpleQueue[Work | tuple[Work, str] | _Update | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._waiting_count = 0
        self._closing = False
        self._waiting: deque[Work] = deque()
        self._by_ticket: dict[int, Work] = {}
        self._next_ticket = 0
        self._next_look = -float("inf")
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Prompts that are not wholly started."""
        return self._waiting_count

    def submit(self, works: Sequence[Work]) -> None:
        """Queue prompts, all of them or none.

        Raises:
            Overloaded: so many would wait.
            RunError: the thread is closed.
        """
        with self._lock:
            self.check_room(len(works))
            self._waiting_count += len(works)
            for work in works:
                self._inbox.put(work)

    def check_room(self, prompts: int = 1) -> None:
        """Refuse what `submit` would refuse, before anything is made of it. Raises Overloaded,
        RunError.
        """
        if self._closing:
            raise RunError(
                "the engine takes no more calls; it is shutting down; call another server"
            )
        if self._waiting_count + prompts > self._most_waiting:
            raise Overloaded(
                f"{prompts} prompts cannot be queued; {self._waiting_count} of at most"
                f" {self._most_waiting} are waiting; try again later"
            )

    def cancel(self, work: Work, why: str) -> None:
        """End a work's rollouts as they are, with `why` as their error; those that have ended stay
        as they were.
        """
        self._inbox.put((work, why))

    def update(
        self, version: int, apply: Callable[[Mapping[str, Any]], None], timeout_s: float = 60.0
    ) -> None:
        """Let `apply` write weights into the engine's tensors between two decode steps; blocks
        until it has.

        Tokens drawn from then on are recorded with `version`. What `apply` raises is raised here;
        the version stays.

        Raises:
            DeadlineError: no safe point was reached in time; `apply` will not be called any more.
        """
        done: Future[None] = Future()
        self._inbox.put(_Update(version, apply, done))
        try:
            done.result(timeout_s)
        except TimeoutError as error:
            if done.done():
                return done.result()
            done.cancel()
            raise DeadlineError(
                f"the update to version {version} waited for the engine's thread; found no end of"
                f" it after {timeout_s} s; look at the server's log, or give it more time"
            ) from error

    def close(self, timeout_s: float = 30.0) -> None:
        """End all rollouts that are under way as they are, and the thread.

        Raises:
            DeadlineError: it did not end in time.
        """
        with self._lock:
            self._closing = True
        self._inbox.put(None)
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(
                f"closing the engine waited for its thread; found it alive after {timeout_s} s; "
                "a decode step takes that long, or `tell` or `apply` hangs"
            )

    def _run(self) -> None:
        while True:
            try:
                if not self._listen():
                    break
                self._decode()
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
                self._log.exception("the engine failed; its rollouts are given up")
                self._give_up(f"the engine failed: {self.failure}; see the server's log")
        self._give_up("the server was shut down before the rollout ended")
        with contextlib.suppress(queue.Empty):
            while True:
                late = self._inbox.get_nowait()
                if isinstance(late, _Update) and late.done.set_running_or_notify_cancel():
                    late.done.set_exception(
                        RunError("the engine takes no more weights; it was shut down; restart it")
                    )

    def _listen(self) -> bool:
        """Take in all messages; wait for one where there is nothing to do. False once closed."""
        idle = not self._waiting and not self.engine.live
        try:
            message = self._inbox.get(timeout=self._idle_s) if idle else self._inbox.get_nowait()
            while message is not None:
                self._take(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _take(self, message: Work | tuple[Work, str] | _Update) -> None:
        if isinstance(message, Work):
            self._waiting.append(message)
        elif isinstance(message, _Update):
            self._adopt(message)
        else:
            self._abort(*message)

    def _adopt(self, update: _Update) -> None:
        if not update.done.set_running_or_notify_cancel():
            return
        try:
            update.apply(self.engine.tensors)
            self.engine.adopted(update.version)
        except BaseException as error:
            update.done.set_exception(error)
        else:
            update.done.set_result(None)

    def _decode(self) -> None:
        starts = self._starts()
        if not starts and not self.engine.live:
            return
        finished = self.engine.step(starts)
        self.failure = None
        self._end(finished)
        begin = self._clock()
        if begin >= self._next_look:
            self._look()
            end = self._clock()
            self._next_look = (
                end + max(self._stream_s, PAUSE * (end - begin)) if self._stream_s else begin
            )

    def _look(self) -> None:
        """Tell of the tokens that streaming rollouts have by now."""
        for ticket, work in self._by_ticket.items():
            if work.streams and (row := self.engine.progress(ticket)) is not None:
                tokens, likeliest = row.tokens[row.start :], self._likeliest(work, ticket)
                self._tell(
                    work, News(work.tickets[ticket], tokens, alternatives=likeliest[: len(tokens)])
                )

    def _starts(self) -> list[PromptStart]:
        """Waiting prompts that start in the next step, in the order of their arrival, as far as
        they fit.
        """
        starts: list[PromptStart] = []
        tokens, free, pages = 0, self.engine.free, self.engine.spare_pages
        while self._waiting and free > 0 and tokens < self._prefill_tokens:
            work = self._waiting[0]
            startable = min(free, len(work.seeds) - work.begun)
            idle = not starts and not self.engine.live
            count, page_count = self.engine.fitting(len(work.prompt), startable, pages, idle=idle)
            if not count:
                break
            free, pages, tokens = free - count, pages - page_count, tokens + len(work.prompt)
            starts.append(self._begin(work, count))
        return starts

    def _begin(self, work: Work, count: int) -> PromptStart:
        tickets = range(self._next_ticket, self._next_ticket + count)
        self._next_ticket += count
        first = work.begun
        work.begun += count
        for place, ticket in enumerate(tickets):
            self._by_ticket[ticket] = work
            work.tickets[ticket] = first + place
        if work.begun == len(work.seeds):
            self._waiting.popleft()
            self._count(-1)
        return PromptStart(
            prompt=work.prompt,
            limit=work.limit,
            tickets=tickets,
            seeds=work.seeds[first : work.begun],
            sampling=work.sampling,
            stop=work.stop,
            alternatives=work.alternatives,
            goes_on=True,
        )

    def _likeliest(
        self, work: Work, ticket: int, *, ended: bool = False
    ) -> Sequence[Sequence[tuple[int, float]]]:
        if not work.alternatives:
            return ()
        alternatives = self.engine.alternatives  # type: ignore[attr-defined]
        return list(alternatives.take(ticket) if ended else alternatives.of(ticket))

    def _end(self, finished: Sequence[EndedRollout]) -> None:
        """Tell of rollouts that ended."""
        for row in finished:
            work = self._by_ticket.pop(row.ticket)
            tokens, error = row.tokens[row.start :], None
            if row.reason == BROKEN:
                error = (
                    f"the model's logits are not finite after {len(tokens)} tokens; look at the"
                    " weights"
                )
            elif row.reason == ABORTED:
                error = work.why or "the rollout was aborted"
            likeliest = self._likeliest(work, row.ticket, ended=True)[: len(tokens)]
            self._tell(
                work, News(work.tickets.pop(row.ticket), tokens, row.reason, error, likeliest)
            )

    def _abort(self, work: Work, why: str) -> None:
        """End a work: what is live as it is, what has not begun without a token."""
        work.why = why
        if work.tickets:
            self._end(self.engine.abort(list(work.tickets)))
        self._lose(work, why)

    def _lose(self, work: Work, why: str) -> None:
        """End what is left of a work without a token."""
        if work in self._waiting:
            self._waiting.remove(work)
            self._count(-1)
        positions = [*work.tickets.values(), *range(work.begun, len(work.seeds))]
        for ticket in work.tickets:
            self._by_ticket.pop(ticket, None)
        work.tickets, work.begun = {}, len(work.seeds)
        for position in positions:
            self._tell(work, News(position, RolloutTokens.joined(()), ABORTED, why))

    def _give_up(self, why: str) -> None:
        """End everything, even where the engine cannot say how far it got."""
        for work in {
            id(work): work for work in [*self._by_ticket.values(), *self._waiting]
        }.values():
            try:
                self._abort(work, why)
            except Exception:
                self._log.exception("rollouts could not be taken out; their tokens are lost")
                self._lose(work, why)
        self.engine.close()

    def _tell(self, work: Work, news: News) -> None:
        try:
            work.tell(news)
        except Exception:
            self._log.exception("a caller could not hear of its rollout")

    def _count(self, change: int) -> None:
        with self._lock:
            self._waiting_count += change


def check_address(host: str, api_key: str | None) -> None:
    """Refuse an address that others can reach, unless a key is asked of them. Raises GraphError."""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local and api_key is None:
        raise GraphError(
            f"the server would be open to anyone who reaches {host}; found no API key; "
            f"bind it to 127.0.0.1, or name an environment variable with a key: --api-key-env NAME"
        )


def bind(
    host: str, port: int, *, otherwise: str = "name another --port or --host"
) -> socket.socket:
    """A socket at this address, not listening yet. otherwise: what to do where the address cannot
    be had, which raises GraphError.
    """
    if not 0 <= port < 1 << 16:
        raise GraphError(
            f"there is no such port; found {port}; give --port from 0 (any that is free) to 65535"
        )
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise GraphError(
            f"the server cannot be bound to {host} port {port}; found: {error}; {otherwise}"
        ) from error
    return listener


def make_service(
    built: BuiltEngine,
    *,
    model: str,
    record: RolloutLog | None = None,
    on_rollout: Sequence[OnRollout] = (),
    most_waiting: int = 256,
    stream_s: float = 0.02,
    chat_template: str | None = None,
    **knobs: Any,
) -> Service:
    """A service over an engine that nothing else drives.

    Args:
        built: from `operators.engine.build.make_engine`.
        model: the name that callers use.
        record: rollouts are appended to it.
        on_rollout: called with the rows of every prompt whose rollouts have ended, on the event
            loop.
        most_waiting: prompts that may wait for a slot; more are refused with 429.
        stream_s: seconds between two looks at the rollouts that stream.
        chat_template: instead of the tokenizer's own.
        knobs: of `Service`: vocabulary, call_timeout_s, most_turns.
    """
    from operators.engine.sampler import Sampling
    from operators.engine.stop_strings import StopCache
    from operators.serving.service import Service

    tokenizer = copy.deepcopy(built.tokenizer)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return Service(
        EngineThread(built.engine, most_waiting=most_waiting, stream_s=stream_s),
        tokenizer,
        model=model,
        ends=built.ends,
        make_sampling=Sampling,
        make_stop=StopCache(built.tokenizer, built.ends),
        on_rollout=(*on_rollout, *([] if record is None else [record.append])),
        numbers=None if record is None else record.numbers,
        **knobs,
    )


async def attend(
    server: uvicorn.Server, service: Service, listener: socket.socket, *, grace_s: float
) -> None:
    """Run a uvicorn server until it is told to exit; calls that still run `grace_s` later end with
    an error.
    """
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.should_exit and not serving.done():
        await asyncio.wait({serving}, timeout=0.1)
    await asyncio.wait({serving}, timeout=grace_s)
    service.end_all("the server was shut down before the rollout ended")
    await serving


def read_template(path: Path) -> str:
    """A chat template from a file. Raises GraphError where it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise GraphError(
            f"the chat template {path} cannot be read; found {error}; name a file in UTF-8"
        ) from error
