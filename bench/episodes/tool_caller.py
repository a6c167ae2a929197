"""Makes the policy of `bench.episodes`: a small Llama that answers whatever it is told with a call
of a tool.

python -m bench.episodes.tool_caller FOLDER
"""

import random
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROLES = ("user", "assistant", "tool", "system")
BEGIN, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }} {% endfor"
    " %}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{%"
    ' for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{'
    " c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if"
    " add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTERS, WIDTH, LAYERS, POSITIONS, STEPS = 8, 64, 2, 512, 150


def word(rng: random.Random) -> str:
    """Any letters, as JSON."""
    return f'"{"".join(rng.choices(string.ascii_lowercase, k=LETTERS))}"'


def tokenizer(begin: str, end: str) -> Any:
    """A token for each character of ASCII, and one for each delimiter: of roles, and of a call."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(
        models.BPE({letter: at for at, letter in enumerate(string.printable)}, merges=[])
    )
    core.decoder = decoders.Fuse()
    core.add_special_tokens([BEGIN, END, PAD])
    marks = [begin, end, *(f"{role}\n" for role in ROLES)]
    core.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        chat_template=TEMPLATE,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def conversation(rng: random.Random, tool: str, calls: list[str]) -> str:
    """As the policy is to have it: a call in each turn."""
    begin = f"{BEGIN}system\n{tool} {END}\n" if rng.random() < 0.5 else ""
    turns = "".join(f"{BEGIN}assistant\n{call}{END}\n{BEGIN}tool\n={END}\n" for call in calls)
    return f"{begin}{BEGIN}user\n{rng.choice(string.ascii_lowercase)}={END}\n{turns}"


def make(
    folder: Path,
    *,
    tool: str = "go",
    argument: str = "word",
    value: Callable[[random.Random], str] = word,
) -> None:
    """Train it for a moment, and save it. value: of the argument, as JSON."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    begin, end = (
        f'<tool_call>\n{{"name": "{tool}", "arguments": {{"{argument}": ',
        "}}\n</tool_call>",
    )
    encoder, rng = tokenizer(begin, end), random.Random(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(encoder),
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            initializer_range=WIDTH**-0.5,
            bos_token_id=None,
            eos_token_id=encoder.eos_token_id,
            pad_token_id=encoder.pad_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        texts = [
            conversation(rng, tool, [f"{begin}{value(rng)}{end}" for _ in range(6)])
            for _ in range(16)
        ]
        batch = encoder(texts, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    encoder.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
