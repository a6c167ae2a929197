"""Makes the engine of a generator that decodes with vLLM, in a process and an environment of its
own.
"""

from __future__ import annotations

from types import SimpleNamespace

from dataflow.runtime import Context
from operators.engine.build import BuiltEngine, context_tokens_of, sampling_of
from operators.engine.knobs import GeneratorKnobs
from operators.engine.stop_strings import StopStrings, stops_of
from operators.engine.vllm.engine import VllmEngine
from operators.models.borders import changing_rope
from operators.models.errors import ModelError
from operators.models.loading import load_configs, load_tokenizer


def build_vllm(declaration: GeneratorKnobs, context: Context) -> BuiltEngine:
    config, generation = load_configs(declaration.model)
    if kinds := changing_rope(config.get_text_config()):
        raise ModelError(
            f"model '{declaration.model.name}' has other rope factors for long sequences than for"
            " short ones; found "
            f'{sorted(kinds)}, of which vLLM chooses by a rule of its own; use engine="native"'
        )
    tokenizer = load_tokenizer(declaration.model)
    holder = SimpleNamespace(config=config, generation_config=generation)
    vocabulary = int(config.get_text_config().vocab_size)
    ends, stop = stops_of(tokenizer, holder, declaration.stop, vocabulary, chat=declaration.chat)
    engine = VllmEngine(
        declaration.model,
        slots=declaration.slots,
        context_tokens=context_tokens_of(declaration, config),
        sampling=sampling_of(declaration),
        end_tokens=sorted(ends),
        stop=StopStrings(tokenizer, stop) if stop else None,
        threads=context.threads,
        device=context.device,
        cache_bytes=declaration.cache_bytes,
        on_update=declaration.on_update,
        start_s=context.limits.start_s,
        deadline_s=context.limits.stuck_s,
    )
    return BuiltEngine(engine, tokenizer, ends)
