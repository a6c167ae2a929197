"""A Llama of one layer with random weights and a character tokenizer, as a Hugging Face folder;
imports torch.
"""

from pathlib import Path

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789= .-"
CONTEXT_TOKENS = 64
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}={{ m.content }}{% if m.role == 'assistant' %}<eos>{%"
    " endif %}-{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)
"""Of that alphabet: `u=hi-a=ab<eos>-`."""


def tiny_policy(
    folder: Path,
    seed: int = 0,
    *,
    layers: int = 1,
    width: int = 32,
    heads: int = 2,
    mlp_width: int = 64,
) -> Path:
    """Write it; prompts and completions are up to `CONTEXT_TOKENS` characters together."""
    from operators.warm_start.launch import WarmStartSpec
    from operators.warm_start.train import character_tokenizer, small_llama

    spec = WarmStartSpec(
        alphabet=ALPHABET,
        layers=layers,
        width=width,
        heads=heads,
        mlp_width=mlp_width,
        max_positions=CONTEXT_TOKENS,
        steps=1,
        batch_size=1,
        learning_rate=1e-3,
        seed=seed,
        threads=1,
        examples_sha256="",
    )
    tokenizer = character_tokenizer(ALPHABET, CONTEXT_TOKENS)
    small_llama(spec, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
