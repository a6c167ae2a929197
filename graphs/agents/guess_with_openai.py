"""Plays a game with a model behind OpenAI's API: find a number by guesses that are answered by
higher or lower.
"""

import json
import sys
from typing import Any

from openai import OpenAI

DIGITS = "0123456789abcdef"


def play(client: OpenAI, prompt: str, secret: int, turns: int) -> float:
    """1 if the model finds the number in so many guesses."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(turns):
        answer = client.chat.completions.create(model="gpt-5-mini", messages=messages)
        guess = answer.choices[0].message.content or ""
        number = DIGITS.find(guess) if len(guess) == 1 else -1
        if number == secret:
            return 1.0
        hint = "?" if number < 0 else "+" if secret > number else "-"
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
    return 0.0


if __name__ == "__main__":
    task = json.load(sys.stdin)
    print(play(OpenAI(), task["prompt"], task["secret"], task["turns"]))
