"""Plays a game with a model behind Anthropic's API: find a number by guesses that are answered by
higher or lower.
"""

import json
import sys
from typing import Any

from anthropic import Anthropic

DIGITS = "0123456789abcdef"


def play(client: Anthropic, prompt: str, secret: int, turns: int) -> float:
    """1 if the model finds the number in so many guesses."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(turns):
        answer = client.messages.create(model="claude-haiku-4-5", max_tokens=16, messages=messages)
        guess = "".join(block.text for block in answer.content if block.type == "text")
        number = DIGITS.find(guess) if len(guess) == 1 else -1
        if number == secret:
            return 1.0
        hint = "?" if number < 0 else "+" if secret > number else "-"
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": hint},
        ]
    return 0.0


if __name__ == "__main__":
    task = json.load(sys.stdin)
    print(play(Anthropic(), task["prompt"], task["secret"], task["turns"]))
