"""The episodes of a graph at work: prompts in, functions in their processes, turns from the
generator, groups out.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dataflow.errors import Unusable
from dataflow.records import (
    COMPLETION,
    EPISODE_COLUMNS,
    ERROR,
    FINISH_REASON,
    GROUP_ID,
    PROMPT,
    ROUND_SIZE,
    SAMPLED_COLUMNS,
    TEMPERATURE,
    AnyArray,
)
from dataflow.rules import prompt_room
from dataflow.runtime import Batch, Context, Runtime
from dataflow.scoring.failure import UNUSABLE, RolloutFailure, status_of
from dataflow.scoring.pool import Answer, Asked
from dataflow.system.text import sound
from operators.chat.chat_format import ChatFormat, Message
from operators.engine.interface import BROKEN, STOPPED, TOO_LONG, EndedRollout
from operators.episodes.chat import Outcome, TurnQuestion, told
from operators.episodes.conversations import (
    Begin,
    KeptTurn,
    RolloutConversations,
    drawn_tokens,
    mark_of_prompt,
    turn_files_of,
)
from operators.episodes.declaration import EpisodeKnobs
from operators.episodes.dialogue import Heard, TurnRequest
from operators.episodes.turn_context import ConversationStarts, PlainContext, request_rows
from operators.episodes.worlds import Worlds, row_bytes
from operators.generation import groups
from operators.generation.groups import PromptGroup
from operators.generation.tokenize import RowLayout, encode
from operators.models.loading import load_tokenizer
from operators.tools.toolbox import Toolbox

UNBOUNDED = 1 << 30
"""Tokens that no conversation comes to: the generator knows the context's end."""


@dataclass
class Majority:
    """Counts faults and warns once, when most of the latest had one."""

    of: int
    """So many are looked at together."""
    sentence: str
    """What is said then: {} of {}, and an example."""
    seen: int = 0
    wrong: int = 0
    notice: str = ""

    def add(self, seen: int, wrong: int, example: str = "") -> None:
        """Some more."""
        self.seen, self.wrong = self.seen + seen, self.wrong + wrong
        if self.seen >= self.of:
            if not self.notice and 2 * self.wrong > self.seen:
                self.notice = self.sentence.format(self.wrong, self.seen, example)
            self.seen = self.wrong = 0


INVALID = (
    "most turns are none that the world can read, {} of {}, such as: {!r}; tell the policy what is"
    " one, or read its turns otherwise (action= of an environment)"
)
VALUELESS = (
    "most episodes end by their budget and have no value, {} of {}; give them more (max_turns,"
    " max_tokens, context) or say what that is worth: catch EpisodeOver, or score them with a"
    " @scorer"
)


@dataclass(eq=False)
class LiveEpisode:
    """One rollout that is being made."""

    group: PromptGroup
    position: int
    talk: RolloutConversations
    columns: bytes
    """Of its prompt, for the function."""
    query: Asked | None = None
    """The question that its function waits with."""
    turn: tuple[int, int] = (0, 0)
    """The conversation and the turn of the policy's in it that it waits for."""
    request: int | None = None
    """The turn that the generator draws for it."""
    error: str | None = None
    """What failed, where it is not the world."""
    failures: int = 0
    """Of the world."""
    counted: tuple[int, int] = (0, 0)
    """Turns that its function has had, and those of them that were invalid, as far as they are
    counted."""
    since: float = 0.0
    """When its function began, or was last told something."""
    returned: Any = None
    columns_of_turns: Mapping[str, Any] | None = None
    """Once it has ended; see `RolloutConversations.columns`."""

    def encode(self, start: int, stop: int) -> bytes:
        """What its call is made with."""
        return self.columns


class EpisodesRuntime(Runtime):
    """Runs an episode for each rollout of each prompt.

    consumes: prompts, and answers of the generator (under the episode's own name), by `push`
    produces: whole groups of rollouts, and requests for turns, from `work`
    waits for: the processes in which the functions run; the generator, in no call
    unblocked by: what they ask or return, or the limits of time and memory; answers
    """

    def __init__(
        self, episode: EpisodeKnobs, context: Context, worlds: Callable[[Toolbox | None], Worlds]
    ) -> None:
        """Load the tokenizer of the generator's model. worlds: builds, given tools, the runner of
        the functions.
        """
        self._episode, self._context, self._name = episode, context, context.node
        assert episode.generator is not None and episode.generator.uses is not None, (
            "the graph was checked"
        )
        self._tokenizer = load_tokenizer(episode.generator.uses)
        self._optional = [name for name in SAMPLED_COLUMNS if name in episode.provides({})]
        options = episode.generator.traits.chat_options
        self._form = ChatFormat(self._tokenizer, **options) if episode.traits.chat else None
        self._plain = PlainContext(self._tokenizer)
        box = episode.toolbox(self._form)
        self._told_tools: Sequence[Message] = () if box is None else box.in_template
        """Definitions that the chat template lays out."""
        self._worlds = worlds(box)
        self._at_once = episode.at_once
        self._files = turn_files_of(context)
        self._waiting: list[tuple[bool, int, int, int, LiveEpisode]] = []
        """Episodes that have not begun, the most urgent first: those of sources without a bound,
        then in order."""
        self._of_source: dict[str, int] = {}
        """How many of these each source has."""
        self._live: dict[int, LiveEpisode] = {}
        """By job."""
        self._asked: dict[int, LiveEpisode] = {}
        """By request: who waits for the generator."""
        self._requests: list[tuple[LiveEpisode, TurnRequest]] = []
        self._complete: list[PromptGroup] = []
        self._episodes: dict[int, list[LiveEpisode]] = {}
        """By object of a group, its episodes."""
        self._kept: dict[str, list[KeptTurn]] = {}
        """By source, turns that are not written down."""
        self._told: list[tuple[LiveEpisode, tuple[int, int], str | None]] = []
        """Episodes whose turn was drawn, and that have not heard of it: what it says, if
        anything."""
        self._begun: dict[str, list[int]] = {}
        self._causes: Counter[str] = Counter()
        """Rollouts that failed, by cause."""
        self._world_s = 0.0
        """That functions were at work, all together."""
        self._invalid, self._valueless = Majority(64, INVALID), Majority(32, VALUELESS)
        self._look = (
            self._worlds.submit(1, lambda *_: b"")
            if episode.can_look and not context.life.attempt
            else None
        )
        """The call that looks at the world, which may say that no episode can be."""
        self._owed = self._turns = self._retried = self._numbered = self._played = 0

    def room(self) -> int:
        """Prompts it would take now."""
        return prompt_room(
            self._at_once,
            (self._of_source.get(source, 0) for source in self._context.graph.columns),
        )

    def push(self, batch: Batch) -> None:
        """Take prompts in, or answers of the generator."""
        if batch.source == self._name:
            self._hear(batch.records)
            return
        records = batch.records
        texts = records.column(PROMPT).to_pylist()
        layouts = RowLayout.of_rows(records)
        encoded = self._encoded(texts, layouts)
        read = records.select(list(self._episode.signature.annotations))
        rounds = records.column(ROUND_SIZE).to_pylist()
        for group in groups.of_prompts(batch, encoded, self._episode.rollouts_per_prompt):
            self._owed += group.size
            text, layout = texts[group.row], layouts[group.row]
            episodes = [
                self._made(group, at, read, self._begins(group, text, layout))
                for at in range(group.size)
            ]
            self._episodes[id(group)] = episodes
            if not group.left:
                self._complete.append(group)
                continue
            if not rounds[group.row]:
                self._recall(group, episodes)
            for episode in episodes:
                self._await(episode)

    def work(self) -> list[Batch] | None:
        """Start episodes, take in the functions' questions, and return requests and complete
        groups.
        """
        moved = self._begin() | self._tell()
        for answer in self._worlds.poll():
            if answer.job == self._look:
                self._seen(answer)
            else:
                self._end(answer)
            moved = True
        for question in self._worlds.asked():
            self._ask(question)
            moved = True
        out = self._out()
        return out if out or moved else None

    def pending(self) -> int:
        """Rollouts that it still owes."""
        return self._owed

    def waits(self) -> Sequence[Any]:
        """The processes, while some function is at work."""
        idle = len(self._asked) == self._worlds.open_calls
        return () if idle else self._worlds.waits()

    def beside(self) -> float:
        """The share of the functions that may run at once which do, and do not wait for the
        policy.
        """
        return (
            (self._worlds.open_calls - len(self._asked)) / self._at_once
            if self._episode.works_beside
            else 0.0
        )

    def forget(self, source: str, group: int) -> None:
        """Remove a group's turns from the disk, once it has an outcome."""
        if source in self._files:
            self._files[source].forget(group)

    def status(self) -> dict[str, float | int | str]:
        """Episodes that are live, those of them that wait for the policy, and those that have not
        begun; turns heard, turns that were told again; failures by cause, and functions that were
        tried again after one; how often a process was replaced; seconds of the functions, all
        together; what is wrong with most of them.
        """
        notice = " ".join(filter(None, (self._invalid.notice, self._valueless.notice)))
        return {
            "active": len(self._live),
            "asking": len(self._asked),
            "waiting": len(self._waiting),
            "turns": self._turns,
            "played": self._played,
            "retried": self._retried,
            **status_of(self._causes),
            "restarts": self._worlds.restarts,
            "world_s": self._world_s,
            **({"notice": notice} if notice else {}),
        }

    def close(self) -> None:
        """End the processes; recorded turns stay on the disk."""
        self._worlds.close()
        for files in self._files.values():
            files.close()

    def _made(
        self, group: PromptGroup, position: int, read: pa.RecordBatch, begin: Begin
    ) -> LiveEpisode:
        key = f"{self._context.run.seed}/{group.source}/{group.group_id}/{position}"
        most, turns = self._episode.max_tokens or UNBOUNDED, self._episode.max_turns
        talk = RolloutConversations(key=key, max_turns=turns, max_tokens=most, begin=begin)
        return LiveEpisode(group, position, talk, row_bytes(read.slice(group.row, 1)))

    def _encoded(
        self, prompts: Sequence[str], layouts: Sequence[RowLayout]
    ) -> list[AnyArray | str]:
        """Tokens of prompts, or what is wrong with them."""
        return encode(
            self._tokenizer,
            prompts,
            layouts,
            node=self._name,
            template=self._form,
            context_tokens=UNBOUNDED,
            tools=self._told_tools,
        )

    def _begins(self, group: PromptGroup, prompt: str, layout: RowLayout) -> Begin:
        """What conversations of a rollout begin with."""
        form, tools = (
            (None, ())
            if self._form is None or not group.left
            else layout.of(self._form, self._told_tools)
        )
        return ConversationStarts(
            self._plain, form, self._episode.past, group.prompt, prompt, tools
        )

    def _question(self, episode: LiveEpisode, query: Asked) -> TurnQuestion:
        """What is asked."""
        return TurnQuestion.of(query.body)

    def _request(self, query: Asked, request: TurnRequest) -> TurnRequest:
        """What the generator is asked for."""
        return request

    def _say(
        self, episode: LiveEpisode, query: Asked, turn: tuple[int, int], text: str | None
    ) -> None:
        """Answer a question. turn: the conversation, and the turn in it. text: None: the policy has
        none left.
        """
        self._worlds.tell(query, told(text))

    def _mark(self, group: PromptGroup) -> int:
        return mark_of_prompt(
            f"{self._context.run.seed}/{group.source}/{group.group_id}", group.prompt
        )

    def _recall(self, group: PromptGroup, episodes: Sequence[LiveEpisode]) -> None:
        """Let episodes begin with what an earlier process kept of them."""
        files = self._files.get(group.source)
        if files is None:
            return
        for position, turns in files.find(group.group_id, self._mark(group)).items():
            if position < len(episodes):
                episodes[position].talk.recall(turns)

    def _await(self, episode: LiveEpisode) -> None:
        source, self._numbered = episode.group.source, self._numbered + 1
        is_bound = source in self._context.graph.bounds
        heapq.heappush(
            self._waiting,
            (is_bound, episode.group.group_id, episode.position, self._numbered, episode),
        )
        self._of_source[source] = self._of_source.get(source, 0) + 1

    def _begin(self) -> bool:
        began = False
        while self._waiting and self._worlds.open_calls < self._at_once:
            *_, episode = heapq.heappop(self._waiting)
            self._of_source[episode.group.source] -= 1
            episode.since = self._context.clock()
            self._live[self._worlds.submit(1, episode.encode)] = episode
            began = True
        return began

    def _ask(self, query: Asked) -> None:
        """A function asks for a turn: a recorded turn is answered at once, a new one is requested,
        once.
        """
        episode = self._live[query.job]
        self._worked(episode)
        question = self._question(episode, query)
        self._count(episode, question.rewards, *question.invalid)
        turn = question.conversation, len(question.rewards[question.conversation])
        try:
            reply = episode.talk.ask(
                question.heard,
                question.most,
                rewards=question.rewards,
                rewritten=question.rewritten,
                conversation=question.conversation,
                origin=question.origin,
            )
        except Exception as error:
            # whatever a template, or a tokenizer, makes of what the world said
            failure = RolloutFailure(self._name, UNUSABLE, f"{type(error).__name__}: {error}")
            episode.error, reply = sound(str(failure)), None
        if not episode.talk.is_drawing(episode.turn[0]):
            self._withdraw(episode)
        if not isinstance(reply, TurnRequest):
            self._played += reply is not None
            self._say(episode, query, turn, reply)
            return
        episode.query, episode.turn, reply = query, turn, self._request(query, reply)
        if episode.request != reply.number:
            self._withdraw(episode)
            episode.request = reply.number
            self._asked[reply.number] = episode
            self._requests.append((episode, reply))

    def _hear(self, answers: pa.RecordBatch) -> None:
        """Take the generator's answers; those for ended episodes are dropped."""
        drawn = drawn_tokens(answers)
        columns = [
            answers.column(name).to_pylist()
            for name in (GROUP_ID, COMPLETION, FINISH_REASON, TEMPERATURE, ERROR)
        ]
        for tokens, number, text, reason, temperature, error in zip(drawn, *columns, strict=True):
            episode = self._asked.get(number)
            if episode is None:
                continue
            self._withdraw(episode)
            group, talk = episode.group, episode.talk
            if error is not None:
                episode.error = error
            if (
                isinstance(begin := talk.begin, ConversationStarts)
                and begin.form is not None
                and begin.tools
            ):
                text = begin.form.spoken(tokens.ids.tolist())
            recorded = (
                None
                if error is not None
                else talk.answer(episode.turn[0], tokens, text, reason, temperature)
            )
            self._told.append(
                (episode, episode.turn, None if recorded is None else recorded.turn.text)
            )
            if recorded is None:
                continue
            self._turns += 1
            if (
                group.source in self._files
                and not group.batch.records.column(ROUND_SIZE)[group.row].as_py()
            ):
                kept_turn = KeptTurn(group.group_id, episode.position, self._mark(group), recorded)
                self._kept.setdefault(group.source, []).append(kept_turn)
            if sum(map(len, talk.rewards)) == 0:
                self._begun.setdefault(group.source, []).append(group.group_id)

    def _tell(self) -> bool:
        """Write the turns down, and only then answer the functions."""
        for source, turns in self._kept.items():
            self._files[source].append(turns)
        drawn, self._kept, self._told = self._told, {}, []
        for episode, turn, text in drawn:
            if episode.query is not None and episode.turn == turn:
                episode.since = self._context.clock()
                self._say(episode, episode.query, turn, text)
        return bool(drawn)

    def _seen(self, answer: Answer) -> None:
        """Take the result of the look at the world. Raises Unusable where no episode is possible;
        an error in looking decides nothing.
        """
        self._look, fault = None, "" if answer.failures else answer.body.decode()
        if fault:
            raise Unusable(f"'{self._name}': {fault}")

    def _count(
        self, episode: LiveEpisode, rewards: Sequence[Sequence[float]], invalid: int, why: str
    ) -> None:
        """Turns that its function has had by now, in this life of it."""
        turns, (had, were) = sum(map(len, rewards)), episode.counted
        self._invalid.add(max(0, turns - had), max(0, invalid - were), why)
        episode.counted = turns, invalid

    def _worked(self, episode: LiveEpisode) -> None:
        """Its function has asked for something, or returned: it was at work until now."""
        now = self._context.clock()
        self._world_s += now - episode.since
        episode.since = now

    def _withdraw(self, episode: LiveEpisode) -> None:
        """Withdraw its request from the generator."""
        if episode.request is not None:
            self._asked.pop(episode.request, None)
            episode.request = None

    def _end(self, answer: Answer) -> None:
        """A function has returned, or failed."""
        episode = self._live.pop(answer.job)
        self._worked(episode)
        episode.failures += bool(answer.failures)
        if answer.failures and episode.error is None and episode.failures < self._episode.tries:
            self._retried += 1
            episode.query, episode.counted = None, (0, 0)
            self._await(episode)
            return
        self._withdraw(episode)
        talk, group = episode.talk, episode.group
        tail: Sequence[Sequence[Heard]] = ()
        error = episode.error or next(
            (f"{self._name}: {text}" for text in answer.failures.values()), None
        )
        reason = STOPPED
        if error is not None:
            reason = BROKEN
            cause = RolloutFailure.read(error).cause
            if not self._causes[cause]:
                self._context.log.warning(
                    "rollouts fail", node=self._name, cause=cause, first=error
                )
            self._causes[cause] += 1
        else:
            outcome = Outcome.of(answer.body)
            episode.returned, tail = outcome.returned, outcome.heard
            talk.end(outcome.rewards)
            self._count(episode, outcome.rewards, *outcome.invalid)
            has_value = self._episode.signature.output is None or episode.returned is not None
            self._valueless.add(1, outcome.is_over and not has_value)
            reason = TOO_LONG if outcome.is_over else STOPPED
        tokens, episode.columns_of_turns = talk.columns()
        group.rows[episode.position] = EndedRollout(
            tokens=tokens,
            start=len(talk.talks[0].prompt),
            reason=reason,
            text=talk.text(tail),
            error=error,
        )
        group.left -= 1
        if not group.left:
            self._complete.append(group)

    def _out(self) -> list[Batch]:
        """Requests, and one batch for each source that has complete groups."""
        if self._context.ledger is not None:
            for source, ids in self._begun.items():
                self._context.ledger.advance(source, sorted(set(ids)), "generating")
        requests, complete = self._requests, self._complete
        self._requests, self._complete, self._begun = [], [], {}
        rows = [(episode.group, request) for episode, request in requests]
        batches = [Batch(self._name, request_rows(rows))] if rows else []
        for source in dict.fromkeys(group.source for group in complete):
            of_source = [group for group in complete if group.source == source]
            batches.append(Batch(source, self._rollouts(of_source)))
            for group in of_source:
                self._owed -= group.size
                group.batch.release(group.group_id)
                del self._episodes[id(group)]
        return batches

    def _rollouts(self, complete: Sequence[PromptGroup]) -> pa.RecordBatch:
        """The rows of complete groups of one source, with what their turns and the function add."""
        batch = groups.rollouts(complete, self._tokenizer, frozenset(), optional=self._optional)
        episodes = [episode for group in complete for episode in self._episodes[id(group)]]
        temperatures = pa.array([episode.talk.temperature for episode in episodes], pa.float64())
        at = batch.schema.get_field_index(TEMPERATURE)
        batch = batch.set_column(at, batch.schema.field(at), temperatures)
        laid = [episode.columns_of_turns or episode.talk.columns()[1] for episode in episodes]
        for name, kind in EPISODE_COLUMNS.items():
            batch = batch.append_column(name, pa.array([columns[name] for columns in laid], kind))
        output = self._episode.signature.output
        if output is None:
            return batch
        return batch.append_column(
            self._name, pa.array([episode.returned for episode in episodes], output)
        )
