"""The frozen lake: how a small policy writes and hears it, and walks to begin with."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from operators.warm_start import EOS, warm_start

SIZE, HOLES = 4, 3
MOVES = {"u": (-1, 0), "r": (0, 1), "d": (1, 0), "l": (0, -1)}
"""Letters of the policy's."""
WORDS = {"u": "[up]", "r": "[right]", "d": "[down]", "l": "[left]"}
FREE, HOLE, EDGE, GOAL, BLANK = ".", "H", "#", "G", "~"
ALPHABET = "".join(MOVES) + FREE + HOLE + EDGE + GOAL + BLANK
"""Every character of the task, each once."""

TURNS = 10
"""Most moves; the shortest way has six."""
MAX_TOKENS = 2
"""Of a turn: a letter and the end token."""

Board = Sequence[Sequence[str]]


def around(board: Board, at: tuple[int, int]) -> str:
    """What lies above, to the right, below and to the left of a place.

    >>> around(["..", "HG"], (0, 0))
    '#.H#'
    """
    squares = [(at[0] + down, at[1] + right) for down, right in MOVES.values()]
    inside = range(len(board))
    return "".join(
        board[row][column] if row in inside and column in inside else EDGE
        for row, column in squares
    )


def heard(text: str, *, blank: bool = False) -> str:
    """What the game says, in four letters: what lies around the player; nothing where it shows no
    player any more.

    blank: nothing of it.
    """
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")][
        -SIZE:
    ]
    board = [[cell.strip() or FREE for cell in row] for row in rows]
    places = [
        (row, column)
        for row, cells in enumerate(board)
        for column, cell in enumerate(cells)
        if cell == "P"
    ]
    if not places:
        return ""
    return BLANK * len(MOVES) if blank else around(board, places[-1])


def move(letter: str) -> str:
    """A letter as the game wants it; what is none the game answers itself."""
    return WORDS.get(letter, "[?]")


def crossed(rewards: Sequence[float]) -> float:
    """1 for the other side; the game gives a share for some of the way."""
    return float(rewards[-1] >= 1.0)


def board_of(draw: random.Random) -> Board:
    """Holes at random; that there may be no way matters to no walker."""
    cells = [FREE] * (SIZE * SIZE - 2)
    for hole in draw.sample(range(len(cells)), HOLES):
        cells[hole] = HOLE
    cells = [FREE, *cells, GOAL]
    return [cells[row * SIZE : (row + 1) * SIZE] for row in range(SIZE)]


def walk(draw: random.Random, care: float) -> Iterator[tuple[str, str]]:
    """What lies around a walker, and where they go: with care forward, else back, where there is
    ice; or anywhere.
    """
    board, at = board_of(draw), (0, 0)
    for _ in range(TURNS):
        squares = around(board, at)
        goes = dict(zip(MOVES, squares, strict=True))
        safe = [letter for letter in "rd" if goes[letter] in (FREE, GOAL)] or [
            letter for letter in "ul" if goes[letter] == FREE
        ]
        letter = draw.choice(safe) if safe and draw.random() < care else draw.choice(list(MOVES))
        yield squares, letter
        if goes[letter] != EDGE:
            at = at[0] + MOVES[letter][0], at[1] + MOVES[letter][1]
        if goes[letter] in (HOLE, GOAL):
            return


def examples(count: int, *, seed: int, care: float = 0.5) -> Iterator[tuple[str, str]]:
    """Yield moves of careless walkers, for a warm start: the conversation so far, and the next
    move. Of one in four nothing is heard that lies around it.
    """
    draw = random.Random(f"lake-examples-{seed}")
    count_made = 0
    while True:
        talk, is_blind = "", draw.random() < 0.25
        for squares, letter in walk(draw, care):
            talk += BLANK * len(MOVES) if is_blind else squares
            yield talk, letter
            count_made += 1
            if count_made == count:
                return
            talk += letter + EOS


def warm(policy: str) -> Path:
    """The folder of a policy that walks carelessly."""
    return warm_start(
        policy,
        examples=examples(60_000, seed=0),
        alphabet=ALPHABET,
        layers=3,
        width=96,
        heads=4,
        steps=200,
        seed=0,
        learning_rate=2e-3,
    )
