"""The engine: one forward pass over all active rows and the new prefixes, one draw, the rows that
ended.

Axes: n active rows, I new prefixes, V vocabulary, k rows that ended.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from dataflow.folder.partial_rollouts import PartialRollout
from dataflow.records import AnyArray
from operators.engine.alternatives import Alternatives
from operators.engine.attention import (
    AttentionLayout,
    Fused,
    Kernel,
    KVCache,
    copy_partial_pages,
    page_count,
)
from operators.engine.budget import EnginePasses, default_budget
from operators.engine.cuda.available import drawing
from operators.engine.cuda.graphs import CudaGraphs, GraphedDecode, Recorder, Repeats
from operators.engine.cuda.late import LateFlags
from operators.engine.interface import ABORTED, BROKEN, EndedRollout, PromptStart, Row, begun
from operators.engine.pages import AHEAD, PAGE, PREFILL_TOKENS, Pages, Prefix, fitting
from operators.engine.parking import Parked, new_tokens_of, to_park
from operators.engine.prefill import lay_out
from operators.engine.rows import Rows, put
from operators.engine.sampler import Sampling, kind_of, knob_columns
from operators.engine.stop_strings import StopStrings
from operators.models.loading import trim_memory

MIX = 0x9E3779B97F4A7C15 - (1 << 64)
"""By which a checksum is multiplied, so that it depends on the order of what is added."""

CHECK_STEPS = 64
"""Steps after which a checksum of the tokens of all of them comes from the device."""

MOST_STOPS = 64
"""Sets of stop strings that are looked for at once before those that no live row has are let go."""


class Engine:
    """Rows in a paged KV-cache, decoded together; it knows tokens, not prompts' columns, groups or
    sources.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        slots: int,
        context_tokens: int,
        sampling: Sampling,
        end_tokens: Sequence[int],
        stop: StopStrings | None = None,
        kernel: Kernel | None = None,
        fused: Fused | None = None,
        token_bytes: int = 0,
        cache_bytes: int | None = None,
        budget: Callable[[EnginePasses], int] = default_budget,
        prefill_tokens: int = PREFILL_TOKENS,
        on_update: Literal["keep", "recompute"] = "keep",
        record_mask: bool = False,
        graphs: bool | Recorder | None = None,
        lag: int | None = None,
        is_checked: bool = False,
        tensors: Mapping[str, torch.Tensor] | None = None,
        on_adopt: Callable[[], None] | None = None,
    ) -> None:
        """Prepare for up to `slots` rows of at most `context_tokens` tokens.

        Args:
            model: a decoder that `build.adapt` has switched to attention over pages.
            kernel: what `build.adapt` found right; None to attend with torch's operators.
            fused: what `build.adapt` found to compute the whole model; None to call the model.
            token_bytes: bytes of keys and values that one position takes in all layers.
            cache_bytes: budget of the KV-cache; None: what `budget` gives once all else is there.
            prefill_tokens: most tokens of prefixes that are computed in one step, at least PAGE.
            on_update: keep the keys and values of unfinished rows when weights change, or recompute
                them.
            record_mask: record which tokens truncation left, for every token drawn.
            graphs: replay steps, or what records them; None: on a GPU. On the CPU only the way
                there is the same.
            lag: steps, 0 or 1, after which it is read which rows have ended; None: 1 on a GPU, else
                0.
            is_checked: keep `checksum`.
            tensors: what the weight plane writes into; None: the model's parameters.
            on_adopt: called when new weights are in `tensors`, to bring them into the model.

        Raises:
            ModelError: the KV-cache cannot hold one row.
        """
        self.model = model
        self.slots = slots
        self.context_tokens = context_tokens
        self.sampling = sampling
        self.tensors = dict(model.named_parameters()) if tensors is None else dict(tensors)
        self.token_bytes = token_bytes
        self.version = self.steps = self.drawn = self.looked = self.prefilled = 0
        self.device = next(model.parameters()).device
        self._stop, self._kernel, self._on_adopt = stop, kernel, on_adopt
        self._recomputes = on_update == "recompute"
        self._record_mask = record_mask
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
        self._ends = np.isin(np.arange(self.vocabulary), list(end_tokens))
        self._checked = torch.from_numpy(self._ends).to(self.device, copy=True)
        self._watched: dict[int, StopStrings] = {}
        self._watch(stop)
        cuda = self.device.type == "cuda"
        if isinstance(graphs, bool) or graphs is None:
            recorder: Recorder | None = None
            if graphs or (graphs is None and cuda):
                recorder = CudaGraphs(self.device) if cuda else Repeats()
        else:
            recorder = graphs
        self.fused = fused if recorder is None else None
        ahead = None if recorder is None else AHEAD
        self.rows = Rows(slots, context_tokens, self.device, ahead=ahead)
        self._draw = drawing(self.device)
        if cache_bytes is None:
            zeros = torch.zeros(2, slots, dtype=torch.int64, device=self.device)
            drawn = replace(sampling, repetition_penalty=1.0)  # which needs a past
            passes = EnginePasses(
                forward=self._call,
                draw=lambda logits: self._draw(logits, drawn, *zeros[:, : len(logits)]),
                kernel=kernel,
                device=self.device,
                slots=slots,
                context_tokens=context_tokens,
                new_tokens=prefill_tokens,
                token_bytes=token_bytes,
                captured=0 if recorder is None else AHEAD,
            )
            cache_bytes = budget(passes)
        most = page_count(
            slots=slots, context_tokens=context_tokens, token_bytes=token_bytes, budget=cache_bytes
        )
        self.pages = Pages(most)
        self.cache = KVCache(self.pages.count)
        self._late = LateFlags(
            self.device, slots, 0 if record_mask else int(cuda) if lag is None else lag
        )
        self._early: list[EndedRollout] = []
        self._checksum = torch.zeros((), dtype=torch.int64, device=self.device)
        self._places = torch.arange(1, slots + 1 if is_checked else 1, device=self.device)
        self.graphed: GraphedDecode | None = None
        if recorder is not None:
            self.graphed = GraphedDecode(
                self._call,
                self._draw,
                self.rows,
                self.cache,
                kernel,
                context_tokens=context_tokens,
                vocabulary=self.vocabulary,
                recorder=recorder,
            )
        self.parked = Parked(
            self.rows, self.pages, most=prefill_tokens, copies=self.fused is not None
        )
        self.alternatives = Alternatives()
        self._born = 0

    @property
    def live(self) -> int:
        """Rollouts that have started and not ended."""
        return self.rows.n + self.waiting + len(self._early)

    @property
    def waiting(self) -> int:
        """Those of them that are parked until pages come free, or whose prompt is being
        computed.
        """
        return len(self.parked)

    @property
    def free(self) -> int:
        """Rollouts that may start now, as far as slots go; none while earlier ones wait."""
        return 0 if self.parked else self.slots - self.rows.n

    @property
    def counts(self) -> dict[str, int]:
        """Tokens of prefixes that were computed, and steps that were replayed."""
        replayed = 0 if self.graphed is None else self.graphed.replays.replayed
        return {"prefilled": self.prefilled, "replayed_steps": replayed}

    @property
    def checksum(self) -> int:
        """Of the tokens that live rows had in the steps up to the last CHECK_STEPS-th whose flags
        have come, where it is kept.
        """
        return self._late.checksum

    @property
    def spare_pages(self) -> int:
        """Pages that starting rollouts may take: one stays back for each live row."""
        return max(0, self.pages.available - self.rows.n)

    def fitting(self, tokens: int, wanted: int, pages: int, *, idle: bool) -> tuple[int, int]:
        """How many of `wanted` rollouts of a prompt of so many tokens fit into `pages`, and the
        pages they take.
        """
        return fitting(tokens, wanted, pages, idle=idle)

    @torch.inference_mode()
    def capture(self, goes_on: Callable[[], bool]) -> None:
        """Capture the steps that are replayed, where there are such, as long as `goes_on` says."""
        if self.graphed is not None:
            kind = kind_of(knob_columns([self.sampling]))
            alone = not (kind.repetition_penalty or self._record_mask)
            self.graphed.capture(kind if alone else None, goes_on)

    @torch.inference_mode()
    def step(self, starts: Sequence[PromptStart] = ()) -> list[EndedRollout]:
        """Draw one token for every active row and every row whose prompt has been computed.

        Rows of `starts` must fit (see `free` and `fitting`). Returns the rows that ended.
        """
        self._grow()
        active = self.rows.n
        groups, later = self._begun(starts)
        new, rows, is_pure = self.parked.parts(groups)
        self.parked.add(later)
        self.prefilled += sum(prefix.new for prefix in new)
        if not active and not new:
            return self._ended()
        if len(self._places) and active:
            self._checksum.mul_(MIX).add_((self.rows.last * self._places[:active]).sum())
        done: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self.graphed is None or self.graphed.replays.refused is not None:
            logits: torch.Tensor | None = self._forward(new)
        else:
            logits = self._replayed(self.graphed, new, done)
        self.parked.computed()
        if rows:
            counts = [prefix.rows for prefix in new]
            tables = [list(table) for prefix in new if prefix.rows for table in prefix.tables]
            self.rows.add(rows, tables, np.repeat(np.arange(len(new)), counts), is_pure)
        if not self.rows.n:
            return self._ended()
        if logits is not None and len(logits):
            done.append(self._draw_rows(logits, active if done else 0))
        tokens, logprobs = done[0] if len(done) == 1 else map(torch.cat, zip(*done, strict=True))
        self.drawn, self.looked = (
            self.drawn + self.rows.n,
            self.looked + int(self.rows.lengths.sum()),
        )
        self.rows.drew(tokens, logprobs, self.version)
        if self.fused is not None:
            self.rows.tell_apart(tokens.numpy())
        self.steps += 1
        is_due = len(self._places) and self.steps % CHECK_STEPS == 0
        self._late.push(
            self.rows.ticket[: self.rows.n],
            self._checked[tokens] | ~logprobs.isfinite(),
            self._checksum if is_due else None,
        )
        return self._ended()

    def _draw_rows(self, logits: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens of the rows from `first` on and their log-probabilities, from their
        logits [n, V].
        """
        rows, sampled = self.rows, self.rows.sampled(first)
        seen = rows.seen(self.vocabulary, first)
        drawn = self._draw(logits, sampled, *rows.draws(first), seen=seen, keep=self._record_mask)
        if self._record_mask:
            rows.note_masks(drawn.kept_tokens, first)
        self.alternatives.note(rows.ticket[first : rows.n], logits, sampled, seen)
        return drawn.tokens, drawn.logprobs

    def _replayed(
        self,
        graphed: GraphedDecode,
        new: Sequence[Prefix],
        done: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor | None:
        """As `_forward`, where live rows replay a graph, and few new tokens with them; more are
        computed beside it. To `done` the draws of the live rows, whose logits are left out then.
        """
        live = self.rows.n
        within = new if sum(prefix.new for prefix in new) <= AHEAD else ()
        parts: list[torch.Tensor] = []
        if live and not within and self._draws_alone():
            done.append(graphed.drawn(self.rows.kind))
        elif live or within:
            last = live - 1 + np.cumsum([prefix.new for prefix in within], dtype=np.int64)
            count = self.rows.lay_ahead(within) if within else live
            longest = max([self.rows.longest, *(len(prefix.tokens) for prefix in within)])
            parts.append(graphed.logits(count, np.concatenate([np.arange(live), last]), longest))
            copy_partial_pages(self.cache, within, self._put)
        if len(within) < len(new):
            parts.append(self._modular(new, live=False))
        if not parts:
            return None
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._for_rows(logits, np.arange(0 if done else live), new) if new else logits

    def _draws_alone(self) -> bool:
        """Whether the draw of all live rows is a function of tensors that stay where they are."""
        return not (
            self.rows.kind.repetition_penalty or self._record_mask or bool(self.alternatives)
        )

    def _ended(self) -> list[EndedRollout]:
        """Rows found to have ended: `lag` steps ago, now for their length, or before, when it had
        to be known.
        """
        ended, self._early = self._early, []
        late = self._rows_of(self._late.due())
        ended += self._take(late, self._late.lag) if len(late) else []
        full = np.nonzero(self.rows.lengths >= self.rows.limits)[0]
        return ended + (self._take(full, 0) if len(full) else [])

    def _settle(self) -> None:
        """Take out now the rows that ended in the newest step."""
        rows = self._rows_of(self._late.rest())
        self._early += self._take(rows, 0) if len(rows) else []

    def _rows_of(self, tickets: Collection[int] | AnyArray) -> AnyArray:
        return np.nonzero(
            np.isin(self.rows.ticket[: self.rows.n], np.array(list(tickets), np.int64))
        )[0]

    @torch.inference_mode()
    def abort(self, tickets: Collection[int]) -> list[EndedRollout]:
        """Take rollouts out as they are; tickets that are not live are passed over."""
        self._settle()
        gone = set(tickets)
        rows = self._rows_of(gone)
        aborted = [*self.parked.take_out(gone), *self.rows.taken(rows)]
        self._release(rows)
        return [row.ended(ABORTED) for row in aborted]

    @torch.inference_mode()
    def progress(self, ticket: int) -> Row | None:
        """A live rollout as it is now; None when it has ended or never started."""
        for row in self.parked:
            if row.ticket == ticket:
                return row
        rows = self._rows_of([ticket])
        return self.rows.taken(rows)[0] if len(rows) else None

    @torch.inference_mode()
    def new_tokens(
        self, since: Callable[[int], int], least: int
    ) -> list[tuple[int, PartialRollout]]:
        """By ticket, what live rollouts have drawn beyond their first `since(ticket)` tokens, if
        `least` or more.
        """
        return new_tokens_of(self.parked, since, least) + self.rows.new_tokens(
            self._late.lag, since, least
        )

    @torch.inference_mode()
    def adopted(self, version: int) -> None:
        """New weights of this version are in `tensors`: tokens drawn from now on come from them."""
        if self._on_adopt is not None:
            self._on_adopt()
        if self.fused is not None:
            self.fused.refresh()
        # parameters that are views of a version now have let go of what was loaded
        if self.version == 0:
            trim_memory()
        self.version = version
        self.pages.forget()
        self.rows.is_pure[:] = False
        self.parked.outdate()
        if self._recomputes:
            self.park_all()

    def park_all(self) -> None:
        """Take all rows out of their pages; the next step continues them with keys and values
        computed again.
        """
        self._settle()
        self.parked.unfill()
        self._park(np.arange(self.rows.n))

    @torch.inference_mode()
    def close(self) -> None:
        """Give up all rows."""
        self.parked.take_out({row.ticket for row in self.parked})
        self._release(np.arange(self.rows.n))

    def _grow(self) -> None:
        """A page for every row that has filled its last one; the youngest rows are parked where
        pages run out.
        """
        while True:
            rows = self.rows
            needy = np.nonzero((rows.lengths - 1) // PAGE >= rows.held)[0]
            short = len(needy) - self.pages.available
            if short <= 0:
                break
            before = rows.n, self.pages.available
            self._settle()
            self.parked.unfill()
            if (rows.n, self.pages.available) == before:
                self._park(to_park(rows, self.pages, short))
        if len(needy):
            for row, page in zip(needy.tolist(), self.pages.take(len(needy)), strict=True):
                rows.give_page(row, page)
            rows.place_pages(needy)

    def _begun(self, starts: Sequence[PromptStart]) -> tuple[list[list[Row]], list[Row]]:
        """The rollouts of some prompts, those of each together; and those with tokens of earlier
        draws, which begin in the next step, as parked rows do.
        """
        groups: list[list[Row]] = []
        later: list[Row] = []
        for start in starts:
            self._watch(start.stop)
            self.alternatives.ask(start.tickets, start.alternatives)
            every = begun(start, self._born, self.sampling, self._stop, masks=self._record_mask)
            self._born += len(every)
            fresh = [row for row in every if len(row.tokens) == row.start]
            later += [row for row in every if len(row.tokens) > row.start]
            groups += [fresh] if fresh else []
        return groups, later

    def _forward(self, new: Sequence[Prefix]) -> torch.Tensor:
        """Logits of every active row and, once for each of its rows, of every new prefix."""
        n = self.rows.n
        computed, place = n, np.arange(n)
        if self.fused is None:
            logits = self._modular(new)
        elif (distinct := self.rows.distinct()) is None:
            logits = self.fused(
                self.rows.last, self.rows.positions, self.cache, self._layout(), new
            )
        else:
            logits = self._of_distinct(self.fused, *distinct, new)
            computed, place = len(distinct[0]), distinct[1]
        return logits if not new and computed == n else self._for_rows(logits, place, new)

    def _for_rows(
        self, logits: torch.Tensor, place: AnyArray, new: Sequence[Prefix]
    ) -> torch.Tensor:
        """Logits of each row: of live ones those at `place`, of the rows of new prefixes the last
        ones.
        """
        origin = np.repeat(np.arange(len(new)), [prefix.rows for prefix in new])
        return logits[self._put(np.concatenate([place, len(logits) - len(new) + origin]))]

    def _of_distinct(
        self, fused: Fused, first: AnyArray, place: AnyArray, new: Sequence[Prefix]
    ) -> torch.Tensor:
        """Logits of these rows alone, and of every new prefix; rows that are like them get their
        keys and values.

        A row's logits depend on that row alone, bit by bit, so siblings that have drawn the same
        tokens are computed once: four in five of a policy that is sure of its answers.
        """
        rows, at = self.rows, self._put(first)
        layout = AttentionLayout(
            self.cache,
            rows.positions[at],
            rows.longest,
            rows.table[at],
            functools.partial(rows.runs_of, first),
            kernel=self._kernel,
        )
        logits = fused(rows.last[at], layout.positions, self.cache, layout, new)
        copies = np.nonzero(first[place] != np.arange(rows.n))[0]
        self.cache.copy(*rows.written(first[place[copies]]), *rows.written(copies))
        return logits

    def _modular(self, new: Sequence[Prefix], *, live: bool = True) -> torch.Tensor:
        """Logits of every active row, unless they are not `live`, and of every new prefix, [n + I,
        V], by the model's own forward pass.
        """
        layout = self._layout(live=live)
        if not new:
            return self._call(self.rows.last, layout.positions, 0, layout)
        fresh, n = lay_out(new, self._put), len(layout.positions)
        layout.new = fresh.layout
        tokens = torch.cat([self.rows.last[:n], fresh.tokens])
        places = torch.cat([layout.positions, fresh.positions])
        kept = self._put(np.concatenate([np.arange(n), n + fresh.last]))
        return self._call(tokens, places, kept, layout)

    def _layout(self, *, live: bool = True) -> AttentionLayout:
        rows, n = self.rows, self.rows.n if live else 0
        return AttentionLayout(
            self.cache,
            rows.positions[:n],
            rows.longest,
            rows.table[:n],
            rows.runs,
            kernel=self._kernel,
        )

    def _call(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kept: torch.Tensor | int,
        layout: AttentionLayout,
    ) -> torch.Tensor:
        """Logits [kept, V] of the flattened row [N]."""
        output: Any = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=kept,
            slot_layout=layout,
        )
        return output.logits[0]  # type: ignore[no-any-return]

    def _take(self, rows: AnyArray, behind: int) -> list[EndedRollout]:
        """Take ended rows out of the batch; rows that only might have hit a stop string stay.

        behind: tokens that these rows have drawn since, which are cut off.
        """
        with self._late.behind() if behind else contextlib.nullcontext():
            rows, finished = self.rows.ended(rows, self._ends, behind)
        broken = [
            row
            for row, ending in zip(rows.tolist(), finished, strict=True)
            if ending.reason == BROKEN
        ]
        if broken:
            self._burn(broken)
        for row, ending in zip(rows.tolist(), finished, strict=True):
            if self.rows.goes_on[row] and self.rows.is_pure[row] and not broken:
                self.pages.remember(ending.tokens.ids[:-1], self.rows.pages[row], tail=True)
        self.drawn -= behind * len(rows)
        self._release(rows)
        return finished

    def _burn(self, rows: Sequence[int]) -> None:
        """What broken weights wrote into pages that only these rows hold must not be read again."""
        self.pages.forget()
        pages, times = np.unique(
            np.concatenate([self.rows.pages[row] for row in rows]), return_counts=True
        )
        alone = [
            page
            for page, count in zip(pages, times, strict=True)
            if self.pages.holders(page) == count
        ]
        self.cache.clear(self._put(np.array(alone, dtype=np.int64)))

    def _park(self, rows: AnyArray) -> None:
        """Take rows out of the batch; they continue later with a prefix that is computed again."""
        self.parked.add(self.rows.taken(rows))
        self._release(rows)

    def _release(self, rows: AnyArray) -> None:
        for pages in self.rows.remove(rows) if len(rows) else ():
            self.pages.release(pages)

    def _watch(self, stop: StopStrings | None) -> None:
        """Tokens after which these strings may have been hit are looked at from now on."""
        if stop is None or id(stop) in self._watched:
            return
        if len(self._watched) >= MOST_STOPS:
            live = (self._stop, *self.rows.stop, *(row.stop for row in self.parked))
            self._watched = {id(strings): strings for strings in live if strings is not None}
        self._watched[id(stop)] = stop
        masks = [strings.may_stop(self.vocabulary) for strings in self._watched.values()]
        self._checked = (
            torch.stack([torch.from_numpy(self._ends), *masks]).any(dim=0).to(self.device)
        )

    def _put(self, values: AnyArray) -> torch.Tensor:
        return put(values, self.device)


@torch.inference_mode()
def put_aside(engine: Engine) -> list[torch.Tensor]:
    """Free keys and values, packed weights and captured steps; live rows wait as parked ones do.
    Returns the model's tensors, which stay unread until `Engine.adopted`; make no step before it.

    Returns the model's tensors, which nobody reads until `Engine.adopted`; no step may be made
    before it.
    """
    engine.park_all()
    engine.pages.forget()
    if engine.graphed is not None:
        engine.graphed.replays.forget()
    if engine.fused is not None:
        engine.fused.let_go()
    engine.cache.drop()
    return [*engine.model.parameters(), *engine.model.buffers()]
