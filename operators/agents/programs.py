"""Programs as the worlds of episodes: each is started for a rollout, calls the endpoint for turns,
and ends.
"""

from __future__ import annotations

import json
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from dataflow.errors import RunError, WorkerDied
from dataflow.records import AnyArray
from dataflow.scoring.failure import DIED, HUNG, RAISED, UNUSABLE, WORLD
from dataflow.scoring.pool import Answer, Asked, Encode
from dataflow.scoring.values import Unscored, applying, checker
from dataflow.tokens.rollout_tokens import RolloutTokens
from operators.agents.declaration import WITHOUT, AgentKnobs
from operators.agents.host_line import EndedProgram, HostLine
from operators.engine.interface import ABORTED, STOPPED, TOO_LONG
from operators.episodes.chat import Outcome, TurnQuestion
from operators.episodes.dialogue import SaidTurn
from operators.serving.errors import ApiError, bad
from operators.serving.work import News, Work


@dataclass(frozen=True)
class CallerLeft:
    """A caller no longer waits for its answer."""

    work: Work


@dataclass(frozen=True)
class RunEngine:
    """The generator, as a service knows it."""

    context_tokens: int
    version: int = 0
    live: int = 0


class TurnsInRun:
    """Hands calls to the rollouts' thread, and keeps track of open sessions.

    consumes: works and cancellations, on the event loop
    produces: the same, from `taken`, on the thread of the rollouts; who answers tells the work
    waits for: nothing
    unblocked by: -
    """

    failure: str | None = None

    def __init__(self, context_tokens: int) -> None:
        """No session is open."""
        self.engine = RunEngine(context_tokens)
        self.sessions: set[str] = set()
        """Keys."""
        self._is_closed = False
        self._arrived: queue.SimpleQueue[Work | CallerLeft] = queue.SimpleQueue()
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Calls that no thread has taken yet."""
        return self._arrived.qsize()

    def fileno(self) -> int:
        """Readable when there is something to take."""
        return self._woken

    def start(self) -> None:
        """It draws already."""

    def check_room(self, prompts: int = 1) -> None:
        """The sessions are its bound."""
        if self._is_closed:
            raise RunError(
                "the run takes no more calls; its episodes are shut down; end the program"
            )

    def submit(self, works: Sequence[Work]) -> None:
        """Take a call. Raises ApiError where it asks for more than one completion."""
        self.check_room()
        if len(works) != 1 or len(works[0].seeds) != 1:
            raise bad(
                "n",
                f"a call in a run has one prompt and one completion; found {len(works)} prompts of "
                f"{len(works[0].seeds)}; ask for one after the other",
                "unsupported_parameter",
            )
        self._put(works[0])

    def cancel(self, work: Work, why: str) -> None:
        """The turn is drawn all the same, for a caller that asks again."""
        self._put(CallerLeft(work))

    def taken(self) -> list[Work | CallerLeft]:
        """What has arrived."""
        try:
            os.read(self._woken, 1 << 12)
        except BlockingIOError:
            return []
        arrivals = []
        while not self._arrived.empty():
            arrivals.append(self._arrived.get_nowait())
        return arrivals

    def close(self, timeout_s: float = 0.0) -> None:
        """Take no more."""
        self._is_closed = True

    def let_go(self) -> None:
        """Close the descriptors, when no thread uses them any more."""
        with self._lock:
            os.close(self._woken)
            os.close(self._wakes)
            self._wakes = -1

    def _put(self, arrived: Work | CallerLeft) -> None:
        self._arrived.put(arrived)
        with self._lock:
            if self._wakes >= 0:
                try:
                    os.write(self._wakes, b"!")
                except BlockingIOError:
                    return


NEVER = (
    "its program ended well and never called the endpoint; found no turn; let it call"
    " OPENAI_BASE_URL"
)
FULL = (
    "what its program sent fills the context, so that the policy has said nothing; let it send less"
)
WORLD_STATUS = 75
"""With which a program ends where what failed is outside, and may be tried again (EX_TEMPFAIL of
sysexits.h)."""
_DEATHS = 3
_OVER = ApiError(
    400, "the policy has no turn left in this rollout; end the program", code="rollout_over"
)


@dataclass(eq=False)
class ProgramCall:
    """A call that waits for its turn."""

    number: int
    """In the life of its program."""
    conversation: int
    """That it goes on, or begins."""
    prompt: AnyArray
    most: int | None
    stop: tuple[str, ...]
    work: Work | None
    """None: whoever called has left, and may ask again."""

    def is_like(self, work: Work) -> bool:
        """Whether a call asks for the same."""
        return np.array_equal(self.prompt, work.prompt) and (self.most, self.stop) == (
            work.most,
            work.stop or (),
        )


@dataclass(eq=False)
class ProgramSession:
    """A rollout whose program runs."""

    job: int
    key: str
    encode: Encode
    deadline: float
    """On the monotonic clock, while no question is open."""
    question_count: int = 0
    """Questions so far."""
    open: ProgramCall | None = None
    next: list[Work] = field(default_factory=list)
    """Calls that came while one was open, in their order."""
    unheard: list[tuple[ProgramCall, SaidTurn]] = field(default_factory=list)
    """Turns, where whoever asked for them had left."""
    heard_ids: dict[int, AnyArray] = field(default_factory=dict)
    """By conversation, all that was said in it."""
    turns: dict[int, int] = field(default_factory=dict)
    """How many turns each has had."""
    failure: str | None = None
    """Why it counts as failed, whatever the program says."""
    is_over: bool = False
    """Whether a call was told that there is no turn left."""
    deaths: int = 0

    def begin(self, key: str, deadline: float) -> None:
        """A program begins, for the first time or anew."""
        self.key, self.deadline, self.open = key, deadline, None
        self.question_count, self.is_over = 0, False
        self.next, self.unheard, self.heard_ids, self.turns = [], [], {}, {}

    def conversation_of(self, prompt: AnyArray, recorded: Mapping[int, AnyArray]) -> int:
        """The number of the conversation that a prompt continues: the longest match, else a new
        one.

        recorded: what conversations of an earlier life began with.
        """
        fitting = [
            (len(ids), number)
            for number, ids in self.heard_ids.items()
            if len(ids) < len(prompt) and np.array_equal(prompt[: len(ids)], ids)
        ]
        if fitting:
            return max(fitting)[1]
        again = {
            number for number, begin in recorded.items() if np.array_equal(begin, prompt)
        } - set(self.heard_ids)
        return min(again or set(range(len(self.heard_ids) + 1)) - set(self.heard_ids))

    def rewards(self, conversation: int = 0) -> list[list[float]]:
        """Of its turns, by conversation: none is worth more than another, until a scorer says
        so.
        """
        most = max([conversation, *self.turns])
        return [[0.0] * self.turns.get(number, 0) for number in range(most + 1)]


class Programs:
    """Runs a program for each job, and carries its calls to the rollouts: `Worlds` of programs.

    consumes: jobs by `submit`; calls, of the endpoint's thread; ends of programs
    produces: answers from `poll`, questions from `asked`
    waits for: nothing; every call returns at once, but for `close`
    unblocked by: `waits`, and the clock, for the limits
    """

    def __init__(
        self,
        agent: AgentKnobs,
        turns: TurnsInRun,
        root: str,
        forget: Callable[[str], None],
        decode: Callable[[AnyArray], str],
        *,
        start_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the process that starts programs. root: of the endpoint. forget: let go of a
        session. decode: tokens as text. start_s: for that process to be ready.
        """
        self.restarts = 0
        self._agent, self._turns, self._root, self._forget = agent, turns, root, forget
        self._decode, self._clock = decode, clock
        self._host = HostLine(agent.python, agent.imports, agent.script_folder, start_s=start_s)
        self._check = (
            None
            if agent.signature.output is None
            else applying(checker(agent.signature.output), True)
        )
        self._next_job = 0
        self._sessions: dict[int, ProgramSession] = {}
        self._by_key: dict[str, ProgramSession] = {}
        self._asked: list[Asked] = []

    @property
    def open_calls(self) -> int:
        """Programs that run."""
        return len(self._sessions)

    @property
    def pid(self) -> int:
        """Of the process that starts programs."""
        return self._host.pid

    def waits(self) -> Sequence[Any]:
        """Descriptors that become readable when calls or ends of programs have come."""
        return self._turns.fileno(), self._host.fileno()

    def submit(self, calls: int, encode: Encode) -> int:
        """Start a program; its number."""
        assert calls == 1, "a rollout is a job"
        job, self._next_job = self._next_job, self._next_job + 1
        self._start(ProgramSession(job, "", encode, 0.0))
        return job

    def poll(self) -> list[Answer]:
        """Carry on; the answers that have come."""
        for arrived in self._turns.taken():
            self._take(arrived)
        is_beginning = not self._host.is_ready
        ended = self._host.ended()
        if ended is None:
            return self._bury()
        # before limits: one that is over is not late any more
        answers = [self._ended(program) for program in ended]
        now = self._clock()
        for session in self._sessions.values() if is_beginning else ():
            # none has begun while what they share was imported
            session.deadline = now + self._agent.timeout_s
        for session in self._sessions.values():
            if session.open is None and now > session.deadline and session.failure is None:
                self.stop(
                    session.job, f"{HUNG}: no call and no end within {self._agent.timeout_s:g} s"
                )
        return answers

    def asked(self) -> list[Asked]:
        """Questions of programs that run, and wait for the answer."""
        questions, self._asked = self._asked, []
        return [question for question in questions if self._waits(question) is not None]

    def question(
        self, query: Asked, recorded: Mapping[int, AnyArray]
    ) -> tuple[ProgramCall, TurnQuestion]:
        """What a program asked. recorded: see `ProgramSession.conversation_of`."""
        session = self._sessions[query.job]
        call = session.open
        assert call is not None and call.number == query.number, "it waits"
        call.conversation = session.conversation_of(call.prompt, recorded)
        past = session.heard_ids.get(call.conversation)
        mark = xxhash.xxh3_128_hexdigest(call.prompt.tobytes() + json.dumps(call.stop).encode())
        question = TurnQuestion(
            heard=() if past is None else (self._decode(call.prompt[len(past) :]),),
            most=call.most,
            rewards=session.rewards(call.conversation),
            rewritten=mark,
            conversation=call.conversation,
        )
        return call, question

    def say(self, query: Asked, turn: SaidTurn | None) -> None:
        """Answer a question; None: there is no turn left."""
        session = self._waits(query)
        if session is None or session.open is None:
            return
        call, session.open = session.open, None
        session.deadline = self._clock() + self._agent.timeout_s
        if turn is None:
            session.is_over = True
            if call.work is not None:
                _refuse(call.work, _OVER)
        else:
            session.heard_ids[call.conversation] = np.concatenate([call.prompt, turn.tokens.ids])
            session.turns[call.conversation] = session.turns.get(call.conversation, 0) + 1
            if call.work is None:
                session.unheard.append((call, turn))
            else:
                _tell(call.work, turn)
        if session.next:
            self._ask(session, session.next.pop(0))

    def tell(self, question: Asked, body: bytes) -> None:
        """Programs are answered by `say`."""
        raise AssertionError("programs are answered by say")

    def stop(self, job: int, why: str) -> None:
        """End a program, which has failed."""
        session = self._sessions[job]
        session.failure = session.failure or why
        self._host.stop(job)

    def close(self) -> None:
        """End all programs."""
        self._host.close()
        for session in self._sessions.values():
            self._forget(session.key)

    def _waits(self, query: Asked) -> ProgramSession | None:
        """The session whose question it is; None where its program has ended or was restarted."""
        session = self._sessions.get(query.job)
        is_open = (
            session is not None and session.open is not None and session.open.number == query.number
        )
        return session if is_open else None

    def _start(self, session: ProgramSession) -> None:
        agent, key = self._agent, f"sk-{secrets.token_urlsafe(32)}"
        session.begin(key, self._clock() + agent.timeout_s)
        self._sessions[session.job] = self._by_key[key] = session
        self._turns.sessions.add(key)
        row = _row(session.encode(0, 1))
        self._host.start(
            session.job,
            {
                "argv": agent.words(row),
                "env": environment(self._root, key, agent.env),
                "without": WITHOUT,
                "marker": key,
                "input": json.dumps(row, default=str) + "\n",
                "memory_mb": agent.memory_mb,
                "output_bytes": agent.output_kb << 10,
            },
        )

    def _take(self, arrived: Work | CallerLeft) -> None:
        if isinstance(arrived, CallerLeft):
            session = self._by_key.get(arrived.work.session or "")
            if (
                session is not None
                and session.open is not None
                and session.open.work is arrived.work
            ):
                session.open.work = None
            elif session is not None and arrived.work in session.next:
                session.next.remove(arrived.work)
            return
        session = self._by_key.get(arrived.session or "")
        if session is None or session.failure is not None:
            _refuse(arrived, _OVER)
            return
        unheard = next((pair for pair in session.unheard if pair[0].is_like(arrived)), None)
        if unheard is not None:
            session.unheard.remove(unheard)
            _tell(arrived, unheard[1])
        elif session.open is None:
            self._ask(session, arrived)
        elif session.open.work is None and session.open.is_like(arrived):
            session.open.work = arrived
        else:
            session.next.append(arrived)

    def _ask(self, session: ProgramSession, work: Work) -> None:
        prompt = np.asarray(work.prompt, np.int32)
        session.open = ProgramCall(
            session.question_count, 0, prompt, work.most, work.stop or (), work
        )
        session.question_count += 1
        self._asked.append(Asked(session.job, 0, session.open.number, b""))

    def _ended(self, program: EndedProgram) -> Answer:
        session = self._sessions.pop(program.number)
        self._close(session)
        returned, failure = (
            self._agent.signature.nothing,
            session.failure or self._failed(session, program),
        )
        if failure is None and not (session.is_over and program.status):
            try:
                returned = self._returned(program.last)
            except Unscored as error:
                failure = f"{UNUSABLE}: the last line of its output {error}"
        if failure is not None:
            return Answer(session.job, [0], {0: failure}, b"")
        outcome = Outcome(
            heard=(), rewards=session.rewards(), is_over=session.is_over, returned=returned
        )
        return Answer(session.job, [0], {}, outcome.to_bytes())

    def _failed(self, session: ProgramSession, program: EndedProgram) -> str | None:
        lines = [line for line in program.errors.splitlines() if line.strip()]
        last = f": {lines[-1].strip()[:300]}" if lines else ""
        if program.is_too_much:
            return f"{UNUSABLE}: it said more than {self._agent.output_kb} KB; let it say less"
        if program.status and not session.is_over:
            if program.status < 0:
                return f"{DIED}: its program ended by signal {-program.status}{last}"
            cause = WORLD if program.status == WORLD_STATUS else RAISED
            return f"{cause}: its program ended with status {program.status}{last}"
        if not session.turns:
            return f"{UNUSABLE}: {FULL if session.is_over else NEVER}"
        return None

    def _returned(self, last: str) -> Any:
        """The column's value in the last line of the output; `null` says that none applies."""
        if self._check is None:
            return None
        if pa.types.is_string(self._agent.signature.output):
            return self._check(last)
        try:
            value = json.loads(last)
        except (ValueError, RecursionError):
            value = last
        if isinstance(value, float) and not math.isfinite(value):
            raise Unscored(f"is {last!r:.60}; let it print a finite number")
        return self._check(value)

    def _bury(self) -> list[Answer]:
        """The process that starts programs is gone, and they with it: all are started again."""
        self.restarts += 1
        importing = f" while it imported {self._host.importing!r}" if self._host.importing else ""
        self._host.restart()
        answers = []
        for session in list(self._sessions.values()):
            self._close(session)
            session.deaths += 1
            if session.failure is None and session.deaths < _DEATHS:
                self._start(session)
                continue
            del self._sessions[session.job]
            died = f"{DIED}: the process that starts programs ended {session.deaths} times"
            failure = session.failure or died + importing
            answers.append(Answer(session.job, [0], {0: failure}, b""))
        if not self._sessions and self.restarts > 100:
            raise WorkerDied(
                f"the process that starts programs of '{self._agent.name}' cannot be kept alive; it"
                f" ended {self.restarts} times; look in the system's log for what ends it"
                " (memory?), then run again"
            )
        return answers

    def _close(self, session: ProgramSession) -> None:
        for work in [
            *session.next,
            *([session.open.work] if session.open and session.open.work else []),
        ]:
            _refuse(work, _OVER)
        session.open, session.next = None, []
        del self._by_key[session.key]
        self._forget(session.key)


def environment(root: str, key: str, more: Mapping[str, str]) -> dict[str, str]:
    """What a program finds in its environment beside that of the run."""
    local = "127.0.0.1,localhost"
    apart = {
        name: ",".join(filter(None, (os.environ.get(name), local)))
        for name in ("NO_PROXY", "no_proxy")
    }
    return {
        **apart,
        **more,
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": key,
    }


def _tell(work: Work, turn: SaidTurn) -> None:
    reason = STOPPED if turn.finish_reason == "stop" else TOO_LONG
    _hear(work, News(0, turn.tokens, reason))


def _refuse(work: Work, error: ApiError) -> None:
    _hear(work, News(0, RolloutTokens.joined(()), ABORTED, error.message, refusal=error))


def _hear(work: Work, news: News) -> None:
    try:
        work.tell(news)
    except RuntimeError:  # the endpoint's loop is closed
        return


def _row(body: bytes) -> dict[str, Any]:
    """The columns of a prompt."""
    rows: Any = pa.ipc.open_stream(pa.py_buffer(body)).read_next_batch().to_pylist()
    return dict(rows[0])
