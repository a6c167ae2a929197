"""What a GGUF file's tokens are as a tokenizer: the files that transformers reads, proved against
the file's own.

Byte-level BPE alone, with ways of cutting text into words that are known: a file names its own
(`tokenizer.ggml.pre`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.gguf.content import GGUFContent, GGUFError

_TOKENS = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _USERS, _UNUSED = 1, 2, 3, 4, 5
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Cut:
    """A way of cutting text into words."""

    regex: str | None = None
    """The regex of a word; None: GPT-2's."""
    digits_alone: bool = False
    """Each digit is a word; before the regex, which then sees what lies between."""
    composed: bool = False
    """Text is put into the normal form NFC first."""
    whole_words: bool = False
    """A word that is a token is that token, whatever the merges make of it."""
    begins: bool = False
    """Whether a text begins with the token of beginning, where the file does not say."""


_LLAMA3 = _Cut(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",
    whole_words=True,
    begins=True,
)
_CUTS = {
    "gpt-2": _Cut(),
    "smollm": _Cut(digits_alone=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Cut(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}", composed=True
    ),
}
"""Cuts by their names in files."""
_OF_FAMILY = {"qwen2": ("qwen2",), "qwen3": ("qwen2",)}
"""Families for which transformers takes a tokenizer of its own, whatever tokenizer.json says: only
with this cut."""
_WITHOUT_EFFECT = {
    "add_space_prefix": False,
    "add_sep_token": False,
    "remove_extra_whitespaces": False,
}
_KNOWN = {
    "model",
    "pre",
    "tokens",
    "token_type",
    "token_type_count",
    "scores",
    "merges",
    "add_bos_token",
    "add_eos_token",
    *_WITHOUT_EFFECT,
}
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_PROBES = (
    (
        "What is 37 + 14? It's 51, isn't it?  I'LL say: 1,234.50 - 9.\n\n\tdef f(x):\n       "
        " return x ** 2\r\n"
    ),
    "Grüße aus Köln, 日本語のテキスト, Здравствуйте, ½ और १२३ 🙂👩‍👩‍👧 e\u0301\u00a0…",
)


def vocabulary_fault(content: GGUFContent) -> str | None:
    """Why a file's tokenizer is not converted, in three parts; None where it may be."""
    try:
        _cut_of(content)
        _kinds(content)
    except GGUFError as error:
        return str(error)
    return None


def template_of(content: GGUFContent) -> str | None:
    """The chat template of a file; None where it has none."""
    template = content.metadata.get(_TEMPLATE)
    return template if isinstance(template, str) and template else None


def ends_of(content: GGUFContent) -> list[int]:
    """Ids at which a completion ends."""
    ids = (content.metadata.get(_TOKENS + key) for key in _ENDS)
    return list(dict.fromkeys(number for number in ids if isinstance(number, int)))


def tokenizer_files(content: GGUFContent, context_tokens: int) -> dict[str, str]:
    """By name, the files of a tokenizer, after a proof that it has the file's tokens and merges, id
    for id. GGUFError where it has not.
    """
    tokens, merges = content.need(_TOKENS + "tokens", list), content.need(_TOKENS + "merges", list)
    tokenizer = _made(content, tokens, merges)
    _prove(content, tokenizer, tokens, merges)
    named = {
        name: tokens[content.metadata[_TOKENS + key]]
        for name, key in _NAMED.items()
        if _TOKENS + key in content.metadata
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        **named,
    }
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False),
    }
    for key, value in content.metadata.items():
        if key == _TEMPLATE:
            files["chat_template.jinja"] = value
        elif key.startswith(f"{_TEMPLATE}.") and isinstance(value, str):
            files[f"additional_chat_templates/{key.removeprefix(f'{_TEMPLATE}.')}.jinja"] = value
    return files


def _cut_of(content: GGUFContent) -> _Cut:
    kind, name = content.need(_TOKENS + "model", str), str(content.metadata.get(_TOKENS + "pre"))
    if kind != "gpt2":
        raise GGUFError(
            f"{content.path.name} has a tokenizer of kind '{kind}', which is not converted; only"
            " byte-level BPE ('gpt2') is; give its folder of safetensors instead"
        )
    cuts = _OF_FAMILY.get(content.metadata.get("general.architecture", ""), _CUTS)
    if name not in cuts:
        raise GGUFError(
            f"{content.path.name} cuts text into words as '{name}', which cannot be proved here;"
            f" known are {', '.join(cuts)}; give its folder of safetensors instead"
        )
    odd = [
        key
        for key, value in content.metadata.items()
        if key.startswith(_TOKENS)
        and not key.endswith("_token_id")
        and (short := key.removeprefix(_TOKENS))
        and (short not in _KNOWN or _WITHOUT_EFFECT.get(short, value) != value)
    ]
    if odd:
        raise GGUFError(
            f"{content.path.name} says {odd[0]}={content.metadata[odd[0]]!r:.60}, and what that"
            " changes in its tokenizer is not known here; give its folder of safetensors instead"
        )
    return _CUTS[name]


def _kinds(content: GGUFContent) -> list[int]:
    """Of each token, what kind it is. GGUFError for tokens that cannot be those of byte-level BPE.
    Bytes may lack a token, as some do in SmolLM2: its own tokenizer leaves them out, too.
    """
    name, tokens = content.path.name, content.need(_TOKENS + "tokens", list)
    kinds: list[int] = content.metadata.get(_TOKENS + "token_type", [_NORMAL] * len(tokens))
    known_kinds = {_NORMAL, _UNKNOWN, _CONTROL, _USERS, _UNUSED}
    if (
        len(set(tokens)) != len(tokens)
        or len(kinds) != len(tokens)
        or not set(kinds) <= known_kinds
    ):
        raise GGUFError(
            f"{name} has tokens twice, or of kinds that byte-level BPE has not: {len(tokens)}"
            f" tokens, {len(set(tokens))} of them unlike, kinds {sorted(set(kinds))[:8]}; give its"
            " folder of safetensors instead"
        )
    wrong = [
        key
        for key in (*_NAMED.values(), *_ENDS)
        if not _is_token(content.metadata.get(_TOKENS + key), tokens)
    ]
    if wrong:
        raise GGUFError(
            f"{name} is damaged: {_TOKENS}{wrong[0]} is {content.metadata[_TOKENS + wrong[0]]!r},"
            f" with {len(tokens)} tokens; copy it again"
        )
    return kinds


def _is_token(number: Any, tokens: Sequence[str]) -> bool:
    return number is None or (isinstance(number, int) and 0 <= number < len(tokens))


def _made(content: GGUFContent, tokens: Sequence[str], merges: Sequence[str]) -> Any:
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    cut, kinds = _cut_of(content), _kinds(content)
    try:
        pairs = [(first, right) for first, right in (merge.split(" ") for merge in merges)]
        model = models.BPE(
            {token: number for number, token in enumerate(tokens)},
            pairs,
            ignore_merges=cut.whole_words,
        )
    except Exception as error:
        raise GGUFError(
            f"{content.path.name} is damaged: its merges do not belong to its tokens ({error});"
            " copy it again"
        ) from error
    tokenizer: Any = Tokenizer(model)
    words: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.digits_alone else []
    if cut.regex is not None:
        words.append(pre_tokenizers.Split(Regex(cut.regex), "isolated"))
    words.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    tokenizer.decoder = decoders.ByteLevel()
    if cut.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != _USERS)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (_CONTROL, _UNKNOWN, _USERS)
        ]
    )
    around = {
        "bos": content.metadata.get(f"{_TOKENS}add_bos_token", cut.begins),
        "eos": content.metadata.get(f"{_TOKENS}add_eos_token", False),
    }
    ids = {
        name: content.need(f"{_TOKENS}{name}_token_id", int)
        for name, adds in around.items()
        if adds
    }
    if ids:
        front, back = ([tokens[ids[name]]] if name in ids else [] for name in ("bos", "eos"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*front, "$A", *back],
            pair=[*front, "$A:0", *back, *front, "$B:1", *back],
            special_tokens=[(tokens[number], number) for number in dict.fromkeys(ids.values())],
        )
    return tokenizer


def _prove(
    content: GGUFContent, tokenizer: Any, tokens: Sequence[str], merges: Sequence[str]
) -> None:
    """Read the tokenizer back from its file, and have it agree with the tokens and merges that it
    came from.
    """
    from tokenizers import Tokenizer

    read: Any = Tokenizer.from_str(tokenizer.to_str())
    ids = {token: number for number, token in enumerate(tokens)}
    if read.get_vocab(with_added_tokens=True) != ids:
        raise _unlike(content, "its vocabulary is another one")
    if [" ".join(pair) for pair in json.loads(read.to_str())["model"]["merges"]] != list(merges):
        raise _unlike(content, "its merges are others")
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    whole = _cut_of(content).whole_words
    for text in _PROBES:
        laid_out = read.normalizer.normalize_str(text) if read.normalizer else text
        words = [word for word, _ in read.pre_tokenizer.pre_tokenize_str(laid_out)]
        expected = [
            ids[token]
            for word in words
            for token in ([word] if whole and word in ids else merged(word, ranks))
        ]
        encoded = read.encode(text, add_special_tokens=False).ids
        if encoded != expected or read.decode(encoded, skip_special_tokens=False) != laid_out:
            raise _unlike(
                content,
                f"it makes {encoded[:12]} of {text[:24]!r}, and the merges make {expected[:12]}",
            )


def merged(word: str, ranks: Mapping[str, int]) -> list[str]:
    """What merges make of a word, by the definition: the pair that was learned first, as long as
    there is one.
    """
    parts = list(word)
    while True:
        pairs = [
            (ranks[pair], at)
            for at in range(len(parts) - 1)
            if (pair := f"{parts[at]} {parts[at + 1]}") in ranks
        ]
        if not pairs:
            return parts
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def _unlike(content: GGUFContent, how: str) -> GGUFError:
    return GGUFError(
        f"the tokenizer made of {content.path.name} is not the file's: {how}; give the model's"
        " folder of safetensors instead, and report this with the file's name"
    )
