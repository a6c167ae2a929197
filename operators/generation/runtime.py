"""The generator at work: prompts in, segments of decode steps, whole groups out, weights taken in
between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.records import (
    COMPLETION,
    ERROR,
    FINISH_REASON,
    GROUP_ID,
    MIN_VERSION,
    MOST_TOKENS,
    OF_GROUP,
    OF_SOURCE,
    PROMPT,
    SAMPLED_COLUMNS,
    SAMPLING_MASK,
    SAMPLING_MASK_TYPE,
    SEED,
    STOP,
    TEMPERATURE,
    TOKENS,
    TURN_ANSWER,
    schema,
)
from dataflow.rules import Admission, enough, leaves, prompt_room
from dataflow.runtime import Batch, Context, KnobsInForce, Runtime
from dataflow.tokens.rollout_tokens import RolloutTokens
from dataflow.weight_ends import WeightsIn
from operators.chat.chat_template import ChatTemplate
from operators.engine.build import make_engine
from operators.engine.decode import put_aside
from operators.engine.interface import TOO_LONG, EndedRollout, PromptStart
from operators.engine.stop_strings import StopCache
from operators.generation import groups
from operators.generation.groups import (
    REASONS,
    PromptGroup,
    SampledWith,
    Turn,
    error_of,
    no_turns,
    partial_rollouts_of,
    queue_of,
    temperature_of,
    texts_of,
    with_turns,
)
from operators.generation.tokenize import RowLayout, encode, unknown_token
from operators.generator import GeneratorKnobs
from operators.models.read_weights import ReadWeights

# Turns that episodes ask a generator for, as groups of one: admitted as the group of their
# rollout, and answered.


def turns_of(
    batch: Batch, context_tokens: int, vocabulary: int, node: str
) -> Iterator[PromptGroup]:
    """The turns of a batch of requests. A conversation that fills the context ends with an empty
    turn; a token beyond the `vocabulary` fails it.
    """
    records = batch.records
    names = (GROUP_ID, OF_SOURCE, OF_GROUP, MIN_VERSION, SEED, MOST_TOKENS, TEMPERATURE, STOP)
    columns = [records.column(name).to_pylist() for name in names]
    lists = records.column(TOKENS)
    for row, values in enumerate(zip(*columns, strict=True)):
        number, source, group_id, min_version, seed, most, temperature, stop = values
        tokens = np.asarray(lists[row].values.to_numpy(), np.int64)
        turn = Turn(
            number=number,
            queue=queue_of(batch.source, source),
            seed=seed,
            limit=len(tokens) + most,
            temperature=temperature,
            stop=tuple(stop or ()),
        )
        group = PromptGroup(
            source=batch.source,
            group_id=group_id,
            size=1,
            min_version=min_version,
            batch=batch,
            row=row,
            prompt=tokens,
            unstarted=1,
            left=1,
            rows=[None],
            turn=turn,
        )
        if (fault := unknown_token(tokens, vocabulary, node)) is not None:
            group.fail(fault)
        elif len(tokens) >= context_tokens:
            ended = EndedRollout(
                tokens=RolloutTokens.given(tokens), start=len(tokens), reason=TOO_LONG, text=""
            )
            group.rows, group.unstarted, group.left = [ended], 0, 0
        yield group


def answers(turns: Sequence[PromptGroup], tokenizer: Any, ends: frozenset[int]) -> pa.RecordBatch:
    """What was drawn of some turns, in the columns of `TURN_ANSWER`."""
    rows = [row for group in turns for row in group.rows if row is not None]
    drawn = [row.tokens[row.start :] for row in rows]
    offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens in drawn])])
    tokens = RolloutTokens.joined(drawn)
    columns = tokens.columns(offsets, sampling_mask=True) | {
        GROUP_ID: pa.array([group.number for group in turns], pa.int64()),
        COMPLETION: pa.array(texts_of(rows, tokenizer, ends), pa.string()),
        TEMPERATURE: pa.array(
            [temperature_of(group) for group in turns], pa.float64(), from_pandas=True
        ),
        FINISH_REASON: pa.array([REASONS[row.reason] for row in rows], pa.string()),
        ERROR: pa.array([error_of(row) for row in rows], pa.string()),
    }
    if tokens.sampling_mask is None:
        columns[SAMPLING_MASK] = pa.nulls(len(rows), SAMPLING_MASK_TYPE)
    return pa.RecordBatch.from_arrays(
        [columns[name] for name in TURN_ANSWER], schema=schema(TURN_ANSWER)
    )


# What decode steps take, by how many rollouts they carry on: it tells seconds of a step from
# those of a rollout.


class DecodeTimes:
    """Steps, rollouts, tokens that these looked back at, and seconds, each summed over steps of
    about as many rollouts.

    >>> times = DecodeTimes()
    >>> for rollouts in (3, 4):
    ...     times.add(rollouts, 100, 0.25)
    >>> times.status()
    {'decode_4_steps': 2, 'decode_4_rollouts': 7, 'decode_4_looked': 200, 'decode_4_s': 0.5}
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, int, int, float]] = {}
        """By the most rollouts of their steps, a power of two."""

    def add(self, rollouts: int, looked: int, seconds: float) -> None:
        """A step has drawn a token for each of so many rollouts, which together had `looked` before
        it.
        """
        if rollouts < 1:
            return
        most = 1 << (rollouts - 1).bit_length()
        steps, drawn, back, spent = self._sums.get(most, (0, 0, 0, 0.0))
        self._sums[most] = (steps + 1, drawn + rollouts, back + looked, spent + seconds)

    def status(self) -> dict[str, float | int]:
        """Small numbers for the heartbeat, which are added up over replicas."""
        return {
            f"decode_{most}_{name}": value
            for most, (steps, rollouts, looked, seconds) in sorted(self._sums.items())
            for name, value in (
                ("steps", steps),
                ("rollouts", rollouts),
                ("looked", looked),
                ("s", round(seconds, 6)),
            )
        }


class GeneratorRuntime(Runtime):
    """Decodes rollouts of waiting prompts, newest weights first.

    consumes: prompts by `push`; weights and notes from the weight plane, between two decode steps
    produces: complete groups, returned from `work`
    waits for: nothing; `work` gives None while no group may start and no rollout is under way
    unblocked by: prompts, a newer version, a note of dropped groups
    """

    def __init__(self, declaration: GeneratorKnobs, context: Context) -> None:
        """Load model and tokenizer onto the device of `context`, and attach the weights to its
        plane.
        """
        self._declaration, self._context = declaration, context
        self._sampled = SampledWith.over(declaration, context.changes)
        built = make_engine(declaration, context)
        self.engine, self.tokenizer, self._ends = built.engine, built.tokenizer, built.ends
        self._native = built.native
        self._stops = StopCache(built.tokenizer, built.ends)
        options = declaration.chat_template_kwargs or {}
        self._template = ChatTemplate(built.tokenizer, **options) if declaration.chat else None
        self._context_tokens = self.engine.context_tokens
        bounds = with_turns(context.graph.bounds, context.graph.episodes)
        self._admission: Admission[PromptGroup] = Admission(bounds, declaration.in_flight)
        reader: WeightsIn | None = None
        attached: Mapping[str, Any] = {}
        if built.reader is not None:
            reader = built.reader()
        elif context.weights.reader is not None:
            attached = self.engine.tensors
            reader = context.weights.reader(attached)
        self._weights = ReadWeights(
            reader, attached, context.devices.aside, built.ranks, context.span
        )
        self._told_dropped = 0
        self._tickets: dict[int, tuple[PromptGroup, int]] = {}
        self._next_ticket = 0
        self._complete: list[PromptGroup] = []
        self._partial = partial_rollouts_of(declaration, context)
        self._first_version = -1 if reader is not None else 0
        """The first that it took."""
        self._started: dict[str, list[int]] = {}
        self._owed = self._begun = 0
        self._seen = (context.clock(), 0, 0)
        self._times = DecodeTimes()
        self._awake = True
        """Whether it has the memory of its devices."""
        self._drains = False

    def room(self) -> int:
        """Prompts it would take now; above 0 while any source that may arrive has no prompt
        waiting, turns aside.
        """
        sources = {*self._context.graph.columns, *no_turns([*self._admission.sources])}
        waiting = (len(self._admission.sources.get(source, ())) for source in sources)
        return prompt_room(self._declaration.slots, waiting)

    def push(self, batch: Batch) -> None:
        """Tokenize the prompts into their source's queue; what cannot be served is complete at
        once.
        """
        for group in self._arriving(batch):
            self._owed += group.size
            if group.left:
                self._admission.add(batch.source if group.turn is None else group.turn.queue, group)
            else:
                self._complete.append(group)

    def _arriving(self, batch: Batch) -> Iterator[PromptGroup]:
        if batch.source in self._context.graph.episodes:
            return turns_of(batch, self._context_tokens, self.engine.vocabulary, self._context.node)
        texts = batch.records.column(PROMPT).to_pylist()
        encoded = encode(
            self.tokenizer,
            texts,
            RowLayout.of_rows(batch.records),
            node=self._context.node,
            template=self._template,
            context_tokens=self._context_tokens,
            vocabulary=self.engine.vocabulary,
        )
        return groups.of_prompts(batch, encoded, self._declaration.group_size)

    def work(self) -> list[Batch] | None:
        """Decode up to `segment_tokens` steps; the groups completed, or None when nothing can be
        done.
        """
        if not self._awake:
            self._weights.hear()
            return self._out() if self._complete else None
        since, worked = 0, False
        many = enough(self._declaration.slots, self._declaration.group_size)
        for _ in range(self._declaration.segment_tokens):
            self._listen()
            if not self._weights.ready:
                break
            starts = self._starts()
            if not starts and not self.engine.live:
                break
            worked = True
            self._complete += groups.collect(self._step(starts), self._tickets)
            since += bool(self._complete)
            is_awaited = any(
                self._admission.is_awaited(
                    group.source, group, self._weights.version, self._dropped()
                )
                for group in self._complete
            )
            if leaves(len(self._complete), since, enough=many, is_awaited=is_awaited):
                break
        if self._partial is not None:
            self._partial.write(self.engine, self._tickets)
        return self._out() if worked or self._complete else None

    def _step(self, starts: list[PromptStart]) -> list[EndedRollout]:
        engine, only_decodes = self.engine, not starts and not self.engine.waiting
        began, drawn, looked = self._context.clock(), engine.drawn, engine.looked
        ended = engine.step(starts)
        if only_decodes:
            self._times.add(
                engine.drawn - drawn, engine.looked - looked, self._context.clock() - began
            )
        return ended

    def pending(self) -> int:
        """Rollouts that it still owes."""
        return self._owed

    def starved(self) -> bool:
        """While prompts wait, no rollout is under way, and none may start under the weights at
        hand.
        """
        if not self._owed or self._complete:
            return False
        if not self._weights.can_be_had:
            return True
        return not self.engine.live and not self._admission.has_due(
            self._weights.version, self._dropped()
        )

    def wants_devices(self) -> bool:
        """While rollouts are under way, or may start, and weights can be had for them."""
        if self._drains or not self._weights.can_be_had:
            return False
        return bool(self.engine.live) or self._admission.has_due(
            self._weights.version, self._dropped()
        )

    def sleep(self) -> None:
        """Free weights and cache; rollouts continue later. Notes and offers still arrive."""
        assert self._native is not None, "what takes turns runs this project's own engine"
        self._weights.sleep(put_aside(self._native))
        self._awake = False

    def wake(self) -> None:
        """Have memory for the weights again; they are adopted, as they were or newer, before the
        next step.
        """
        self._weights.wake()
        self._awake = True

    def waits(self) -> Sequence[Any]:
        """The weight plane's socket, where it has one."""
        return () if self._weights.socket is None else (self._weights.socket,)

    def forget(self, source: str, group: int) -> None:
        """Remove a group's partial rollouts from the disk, once it has an outcome."""
        if self._partial is not None:
            self._partial.forget(source, group)

    def change(self, knobs: KnobsInForce) -> None:
        """For groups that start from now on; bounds at once."""
        self._declaration, self._admission.bounds = (
            knobs.operator,
            with_turns(knobs.bounds, self._context.graph.episodes),
        )
        self._sampled.append(SampledWith.of(knobs.operator))

    def tell(self, message: Mapping[str, Any]) -> None:
        """Hears {"dropped": groups that the trainer gave up} and {"drain": whether those it takes
        turns with end}.
        """
        self._drains = bool(message.get("drain", self._drains))
        self._told_dropped = max(self._told_dropped, int(message.get("dropped", 0)))

    def status(self) -> dict[str, float | int | str]:
        """Version, active rollouts, waiting prompts; tokens/s and share of slots used since the
        last call; `begun`: rollouts that have not left, and would be drawn again; `recalled`:
        tokens that an earlier process had drawn; `looked`: tokens looked back at; `decode_64_s` and
        the like: of steps with 33 to 64 rollouts that began none; `prefilled`: tokens of prompts
        computed; `replayed_steps`: decode steps that were graphs.
        """
        now, drawn, steps = self._context.clock(), self.engine.drawn, self.engine.steps
        then, drawn_then, steps_then = self._seen
        self._seen = (now, drawn, steps)
        slot_steps = (steps - steps_then) * self._declaration.slots
        return {
            "version": self.engine.version,
            "active": self.engine.live,
            "waiting": len(self._admission),
            "tokens": drawn,
            "decode_steps": steps,
            "looked": self.engine.looked,
            **({} if self._native is None else self._native.counts),
            "tokens_per_s": (drawn - drawn_then) / (now - then) if now > then else 0.0,
            "parked": self.engine.waiting,
            "begun": self._begun,
            "recalled": 0 if self._partial is None else self._partial.recalled,
            "slot_share": (drawn - drawn_then) / slot_steps if slot_steps else 0.0,
            **self._times.status(),
        }

    def under_way(self) -> dict[str, int]:
        """Tokens drawn and rollouts that are being drawn: a slice of a large model takes
        minutes.
        """
        return {"tokens": self.engine.drawn, "active": self.engine.live}

    def close(self) -> None:
        """Give up the rollouts that are under way; what was written down of them stays."""
        self.engine.close()
        self._weights.close()
        if self._partial is not None:
            self._partial.close()

    def _listen(self) -> None:
        """A safe point: take the newest weights that are offered; a restarted trainer's may have
        the same number.
        """
        version = self._weights.take()
        if version is not None:
            self.engine.adopted(version)
            self._first_version = version if self._first_version < 0 else self._first_version

    def _starts(self) -> list[PromptStart]:
        """Groups that start in the next step."""
        if self._weights.version < 0:
            return []
        starts: list[PromptStart] = []
        spare, dropped = self.engine.spare_pages, self._dropped()

        def prepare(group: PromptGroup) -> None:
            if self._partial is not None and group.mark is None:
                self._partial.recall(
                    group, self._sampled, lambda rollout: self._may_go_on(group, rollout, dropped)
                )
            if group.sampled != self._sampled[-1] and group.is_new:
                group.sample(self._sampled[-1], self._context.run.seed)

        def fit(group: PromptGroup, most: int) -> int:
            nonlocal spare
            going_on = min(most, len(group.partial))  # they wait for pages as parked ones do
            if going_on == most:
                return most
            idle = not starts and not self.engine.live
            count, pages = self.engine.fitting(len(group.prompt), most - going_on, spare, idle=idle)
            spare -= pages
            return going_on + count

        chosen = self._admission.start(
            free=self.engine.free,
            slots=self._declaration.slots,
            idle=not self.engine.live,
            version=self.engine.version,
            dropped=dropped,
            fit=fit,
            prepare=prepare,
        )
        for _, group, count in chosen:
            if not count:
                self._complete.append(group)
                continue
            starts.append(self._start(group, count))
        return starts

    def _dropped(self) -> int:
        """Groups that the trainer gave up, as far as is known."""
        return max(self._told_dropped, int(self._weights.note.get("dropped", 0)))

    def _start(self, group: PromptGroup, count: int) -> PromptStart:
        """Begin `count` more rollouts of a group."""
        if group.turn is None and group.unstarted == len(group.order or group.rows):
            self._started.setdefault(group.source, []).append(group.group_id)
        tickets = range(self._next_ticket, self._next_ticket + count)
        self._next_ticket += count
        positions = group.start(count)
        group.begun += count
        self._begun += count
        for ticket, position in zip(tickets, positions, strict=True):
            self._tickets[ticket] = (group, position)
        key = f"{self._context.run.seed}/{group.source}/{group.group_id}"
        seeds = (
            [_seed(key, position) for position in positions]
            if group.turn is None
            else [group.turn.seed]
        )
        return PromptStart(
            prompt=group.prompt,
            limit=self._limit(group),
            sampling=group.sampling,
            stop=None
            if group.turn is None or not group.turn.stop
            else self._stops(group.turn.stop),
            tickets=tickets,
            seeds=seeds,
            goes_on=group.turn is not None,
            partial=[group.partial.pop(position, None) for position in positions],
        )

    def _may_go_on(self, group: PromptGroup, rollout: PartialRollout, dropped: int) -> bool:
        """Whether a rollout may be gone on with that an earlier process began."""
        room = self._limit(group) - len(group.prompt) - len(rollout.tokens)
        if room < (0 if rollout.finish_reason else 1):
            return False
        return self._admission.may_go_on(
            group.source, group, rollout.tokens.versions, self._first_version, dropped
        )

    def _limit(self, group: PromptGroup) -> int:
        """Most tokens of prompt and completion."""
        assert group.sampled is not None, "it was prepared"
        most = min(self._context_tokens, len(group.prompt) + group.sampled.max_tokens)
        return most if group.turn is None else min(most, group.turn.limit)

    def _out(self) -> list[Batch]:
        """One batch for each source that has complete groups; acknowledges arrivals that are done
        with.
        """
        if self._context.ledger is not None:
            for source, ids in self._started.items():
                self._context.ledger.advance(source, ids, "generating")
        self._started = {}
        by_source: dict[str, list[PromptGroup]] = {}
        for group in self._complete:
            by_source.setdefault(group.source, []).append(group)
        self._complete = []
        batches = []
        provides = self._declaration.provides({})
        optional = [name for name in SAMPLED_COLUMNS if name in provides]
        for source, complete in by_source.items():
            build_rows = (
                answers
                if source in self._context.graph.episodes
                else partial(groups.rollouts, optional=optional)
            )
            batches.append(Batch(source, build_rows(complete, self.tokenizer, self._ends)))
            for group in complete:
                self._owed -= group.size
                self._begun -= group.begun
                group.batch.release(group.number)
        return batches


def _seed(key: str, position: int) -> int:
    """A rollout's seed, int64: it depends on neither other rollouts nor the replica."""
    return xxhash.xxh3_64_intdigest(f"{key}/{position}".encode()) - (1 << 63)
