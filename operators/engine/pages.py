"""Which page of the KV-cache is free, shared or kept for reuse: pure accounting; it knows no
tensors.

A page holds PAGE neighbouring positions of one sequence, in every layer. Full pages of a prompt are
shared by all rows that begin with it; they are never written again. A prefix is found by the hash
of its tokens, and all prefixes are forgotten when the weights change, since keys and values belong
to the weights that made them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from dataflow.records import AnyArray

PAGE = 16
"""Positions in a page."""
PREFILL_TOKENS = 2048
"""New tokens of prefixes that one step computes at most, where nobody says."""
AHEAD = 512
"""New tokens of prefixes that a replayed step takes as rows beside the live ones."""
MOST_NEAR = 64
"""Pages behind one prefix that are looked at for the beginning that they have in common with new
tokens."""


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Tokens whose keys and values are computed in this step, for rows that all begin with them."""

    tokens: AnyArray
    """int64 [L], at least 1."""
    cached: int
    """How many full pages of them were there before, or are filled by an earlier prefix of this
    step."""
    tables: Sequence[Sequence[int]]
    """Pages of each row; they share all full ones."""
    near: int = -1
    """A page, there before or filled by an earlier prefix of this step, that begins as the first
    page to compute does; -1: none."""
    alike: int = 0
    """Tokens that they have in common, whose keys and values are copied."""
    is_part: bool = False
    """Whether more of the same rows' tokens follow in a later step."""

    @property
    def rows(self) -> int:
        """Rows that draw their next token behind it."""
        return 0 if self.is_part else len(self.tables)

    @property
    def begin(self) -> int:
        """The first position to compute."""
        return self.cached * PAGE + self.alike

    @property
    def new(self) -> int:
        """Tokens to compute."""
        return len(self.tokens) - self.begin

    def cut(self, most: int) -> tuple[Prefix, Prefix | None]:
        """What is computed of it first, at most so many tokens, of at least PAGE; and what is left,
        which begins with a page.

        >>> prefix = Prefix(tokens=np.arange(40), cached=0, tables=[[3, 1, 2]])
        >>> first, rest = prefix.cut(20)
        >>> first.new, first.rows, rest.new, rest.rows
        (16, 0, 24, 1)
        """
        if self.new <= most:
            return self, None
        end = (self.begin + most) // PAGE
        first = replace(
            self, tokens=self.tokens[: end * PAGE], tables=self.tables[:1], is_part=True
        )
        return first, replace(self, cached=end, near=-1, alike=0)


def pages_for(tokens: int) -> int:
    """Pages that this many positions take."""
    return -(-tokens // PAGE)


def fitting(tokens: int, wanted: int, pages: int, *, idle: bool) -> tuple[int, int]:
    """How many of `wanted` rollouts of a prompt of so many tokens fit into `pages`, and the pages
    they take.

    Each takes a page to write into; the first takes the prompt's full pages too. An idle engine
    fits one always.
    """
    whole = tokens // PAGE
    count = max(int(idle), min(wanted, pages - whole))
    return (count, whole + count) if count > 0 else (0, 0)


class Pages:
    """Free pages, how many rows hold each of the others, and which prefixes are still to be found
    in them.
    """

    def __init__(self, count: int) -> None:
        """Begin with `count` free pages, handed out from page 0 on."""
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._behind: dict[bytes, dict[int, AnyArray]] = {}
        """By key of a prefix, the pages known to follow it, with their tokens."""
        self._before: dict[int, bytes] = {}
        self._tails: set[int] = set()
        """Pages that are known by what is in their first part."""
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that could be taken now: free ones, and those kept only because they might be found
        again.
        """
        return len(self._free) + len(self._idle)

    def holders(self, page: int) -> int:
        """How many rows hold the page."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Pages for one row; the prefixes that were idle longest make room. Raises MemoryError when
        short.
        """
        if count > self.available:
            raise MemoryError(
                f"{count} pages of the KV-cache are needed, {self.available} are available"
            )
        pages = []
        for _ in range(count):
            if not self._free:
                page, _ = self._idle.popitem(last=False)
                self._unkey(page)
                self._free.append(page)
            page = self._free.pop()
            self._holders[page] = 1
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int], times: int = 1) -> None:
        """Let `times` more rows hold these pages."""
        for page in pages:
            self._holders[page] += times
            self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """One row less holds each of these pages; the last to leave frees it, or leaves it to be
        found.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def find(self, tokens: AnyArray) -> list[int]:
        """Pages that hold the longest known prefix of these tokens, int64 [n], but at most n - 1 of
        them.
        """
        pages: list[int] = []
        if self._by_key:
            for key in _keys(tokens[: len(tokens) - 1]):
                page = self._by_key.get(key)
                if page is None:
                    break
                pages.append(page)
        return pages

    def near(self, tokens: AnyArray, known_pages: int) -> tuple[int, int]:
        """The page, held by some row or of a remembered tail, that begins most like these tokens do
        behind their first `known_pages` pages, and how many tokens are alike, at most all but the
        last; (-1, 0) without any.
        """
        keys = _keys(tokens[: known_pages * PAGE])
        before = keys[-1] if keys else b""
        behind = self._behind.get(before, {})
        ahead = tokens[known_pages * PAGE : len(tokens) - 1][:PAGE]
        nearest, alike = -1, 0
        for count in range(min(len(ahead), PAGE - 1), 0, -1) if self._tails else ():
            page = self._by_key.get(_key(before, ahead[:count]))
            if page is not None:
                nearest, alike = page, count
                break
        for page in list(behind)[-MOST_NEAR:]:
            same = int((behind[page][: len(ahead)] == ahead).cumprod().sum())
            if same > alike and self._holders[page]:
                nearest, alike = page, same
        return nearest, alike

    def remember(self, tokens: AnyArray, pages: Sequence[int], *, tail: bool = False) -> None:
        """Let the full pages of these tokens be found from now on; with their `tail`, what is in
        the page behind these, too, which is not written any more.
        """
        before = b""
        for i, (key, page) in enumerate(zip(_keys(tokens), pages, strict=False)):
            if key not in self._by_key and page not in self._key_of:
                self._by_key[key] = page
                self._key_of[page] = key
                self._before[page] = before
                self._behind.setdefault(before, {})[page] = np.array(
                    tokens[i * PAGE : (i + 1) * PAGE]
                )
            before = key
        rest = tokens[len(tokens) // PAGE * PAGE :]
        if tail and len(rest):
            key, page = _key(before, rest), pages[len(tokens) // PAGE]
            if key not in self._by_key and page not in self._key_of:
                self._by_key[key], self._key_of[page] = page, key
                self._tails.add(page)

    def forget(self) -> None:
        """No prefix is found any more: the weights have changed."""
        self._by_key.clear()
        self._key_of.clear()
        self._behind.clear()
        self._before.clear()
        self._tails.clear()
        self._free += self._idle
        self._idle.clear()

    def _unkey(self, page: int) -> None:
        del self._by_key[self._key_of.pop(page)]
        if page in self._tails:
            self._tails.remove(page)
            return
        before = self._before.pop(page)
        del self._behind[before][page]
        if not self._behind[before]:
            del self._behind[before]


def _keys(tokens: AnyArray) -> list[bytes]:
    """A key of every full page, each of which stands for all tokens up to its end."""
    keys, key = [], b""
    dense = np.ascontiguousarray(tokens, dtype=np.int64)
    for first in range(0, len(dense) - PAGE + 1, PAGE):
        key = _key(key, dense[first : first + PAGE])
        keys.append(key)
    return keys


def _key(before: bytes, tokens: AnyArray) -> bytes:
    """Of tokens in one page, and all before them."""
    return xxhash.xxh3_128_digest(before + np.ascontiguousarray(tokens, np.int64).tobytes())
