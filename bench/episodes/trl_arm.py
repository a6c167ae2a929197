"""TRL's arm of `bench.episodes`: the same worlds, policy and prompts in GRPOTrainer with
`environment_factory`.

python -m bench.episodes.trl_arm SETTINGS   JSON in, figures as JSON out; run by a Python that has
                                            trl
"""

import importlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.episodes.slow_world import SlowWorld
from bench.episodes.subset import together_s


def main(settings: dict[str, Any]) -> dict[str, Any]:
    """Train for as many steps as the episodes are; busy is what its method for one turn of a batch
    takes, waited_s the time in which a world was at work.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    trl: Any = importlib.import_module("trl")
    schemas: Any = importlib.import_module("trl.chat_template_utils")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(settings["policy"], padding_side="left")
    tokenizer.response_template = schemas.qwen3_template
    model = AutoModelForCausalLM.from_pretrained(settings["policy"], dtype=torch.float32)
    spans: list[tuple[float, float]] = []
    ends: list[float] = []
    worlds: list[tuple[float, float]] = []

    class Watched(SlowWorld):
        async def go(self, word: str) -> str:
            begin = time.monotonic()
            try:
                return await super().go(word)
            finally:
                worlds.append((begin, time.monotonic()))

        go.__doc__ = SlowWorld.go.__doc__

    class Watcher(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.monotonic())

    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            seed=0,
            per_device_train_batch_size=settings["batch"],
            gradient_accumulation_steps=1,
            num_generations=settings["group_size"],
            num_iterations=1,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            beta=0.0,
            max_completion_length=settings["completion"],
            max_tool_calling_iterations=settings["turns"],
            loss_type="dr_grpo",
            scale_rewards="none",
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            max_steps=settings["episodes"] // settings["batch"],
            dataloader_num_workers=0,
            save_strategy="no",
            dataloader_pin_memory=False,
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            shuffle_dataset=False,
        )
        trainer = trl.GRPOTrainer(
            model=model,
            args=config,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(settings["rows"]),
            environment_factory=Watched,
            callbacks=[Watcher()],
        )
        generate = trainer._generate_single_turn

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.monotonic()
            try:
                return generate(*arguments, **named)
            finally:
                spans.append((begin, time.monotonic()))

        trainer._generate_single_turn = timed
        trainer.train()
    seconds = ends[-1] - spans[0][0]
    busy = sum(end - begin for begin, end in spans)
    return {
        "seconds": seconds,
        "busy": busy / seconds,
        "episodes_per_s": settings["episodes"] / seconds,
        "version": trl.__version__,
        "waited_s": together_s(worlds),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
