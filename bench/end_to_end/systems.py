"""The four systems of the end-to-end bench, each run once in this process; torch and TRL come in
where needed.

All train on the same batches (as many prompts as the case says x 8 rollouts at temperature 1) with
the same loss: log-probabilities times the advantage over the group's mean, summed over tokens and
divided by the rollouts, no KL term, gradient norm clipped at 1, one step of AdamW (lr constant,
betas 0.9 and 0.999, no weight decay).

TRL's nearest is loss_type="dr_grpo" with scale_rewards="none", beta=0 and one iteration: with one
update per batch the clipped ratio is 1, so its gradient is the same, but divided by
max_completion_length as well; the clipping norm is divided by the same number, and AdamW takes no
notice of the scale (its epsilon aside). Our graphs weigh each token by AIPO's importance ratio,
which is 1 in the synchronous one.
"""

import importlib
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.end_to_end.cases import ASYNC_STALENESS, Case, Row
from bench.end_to_end.pace import GROUP_SIZE, Measured, Stopwatch

GRAD_CLIP = 1.0


def run_system(system: str, case: Case, *, seed: int, threads: int, born: float) -> Measured:
    """Run one system on one case; `born` is when this process was started, by time.time()."""
    if system == "plain":
        return run_plain(case, seed=seed, threads=threads, born=born)
    if system == "trl":
        return run_trl(case, seed=seed, threads=threads, born=born)
    staleness = ASYNC_STALENESS if system == "async" else 0
    return run_ours(case, system, max_staleness=staleness, seed=seed, threads=threads, born=born)


def cooldown(system: str) -> int:
    """Steps at the end of a run that are not counted: the asynchronous generator has then run out
    of prompts.
    """
    return ASYNC_STALENESS + 1 if system == "async" else 0


def total_steps(system: str, case: Case) -> int:
    """Warm-up, counted steps and cool-down."""
    return case.warmup[system] + case.steps[system] + cooldown(system)


def run_plain(case: Case, *, seed: int, threads: int, born: float) -> Measured:
    """The loop of `plain_loop`, of its parts, with as many calls of the reward at once as the case
    allows.
    """
    import torch

    from bench.end_to_end.plain_loop import generate, load, update

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model, tokenizer = load(case.policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr, weight_decay=0.0)
    picks = _forever(case.rows, seed)
    watch = Stopwatch(born)
    _evaluate(watch, model, tokenizer, case)
    with ThreadPoolExecutor(case.calls) as pool:
        for _ in range(total_steps("plain", case)):
            rows = [row for _ in range(case.prompts_per_step) for row in [next(picks)] * GROUP_SIZE]
            tokens, attention, start = generate(
                model, tokenizer, [row["prompt"] for row in rows], case.max_tokens
            )
            completions = tokenizer.batch_decode(tokens[:, start:], skip_special_tokens=True)
            scores_P_G = torch.tensor(_scores(case, pool, completions, rows)).view(-1, GROUP_SIZE)
            advantage_B = (scores_P_G - scores_P_G.mean(1, keepdim=True)).flatten()
            update(model, optimizer, tokens, attention, start, advantage_B, GRAD_CLIP)
            watch.step(attention[:, start:].sum(1).tolist())
            if _is_due(watch, case):
                _evaluate(watch, model, tokenizer, case)
    return watch.measured()


def run_trl(case: Case, *, seed: int, threads: int, born: float) -> Measured:
    """TRL's GRPOTrainer on the CPU: one generation, one forward and backward, one update per
    step.
    """
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback

    from bench.end_to_end.plain_loop import load

    trl: Any = importlib.import_module("trl")
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model, tokenizer = load(case.policy)
    watch = Stopwatch(born)
    lengths: list[int] = []
    pool = ThreadPoolExecutor(case.calls)

    def reward(
        completions: list[str], answer: list[str], completion_ids: list[Any], **_: Any
    ) -> list[float]:
        lengths[:] = map(len, completion_ids)
        return _scores(case, pool, completions, [{"answer": text} for text in answer])

    class Watcher(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.step(lengths)
            if _is_due(watch, case):
                _evaluate(watch, model, tokenizer, case)

    _evaluate(watch, model, tokenizer, case)
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            seed=seed,
            per_device_train_batch_size=case.prompts_per_step * GROUP_SIZE,
            gradient_accumulation_steps=1,
            num_generations=GROUP_SIZE,
            num_iterations=1,
            max_completion_length=case.max_tokens,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            beta=0.0,
            loss_type="dr_grpo",
            scale_rewards="none",
            learning_rate=case.lr,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            optim="adamw_torch_fused",
            max_grad_norm=GRAD_CLIP / case.max_tokens,
            max_steps=total_steps("trl", case),
            dataloader_num_workers=0,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(list(case.rows)),
            callbacks=[Watcher()],
        )
        trainer.train()
    pool.shutdown()
    return watch.measured()


def run_ours(
    case: Case, system: str, *, max_staleness: int, seed: int, threads: int, born: float
) -> Measured:
    """Our graph in its worker processes, with every guarantee on: ledger, run folder, checksums,
    killable scorers.

    Accuracy is measured afterwards on the checkpoints, by the same function as for the other
    systems; writing them counts as training.
    """
    from dataflow import Graph, Model, run, scorer
    from operators import Generator, Prompts, Trainer
    from operators.credit import advantage
    from operators.losses import aipo

    graph, model = Graph(f"bench-{system}"), Model(str(case.policy), dtype=case.dtype)
    prompts = Prompts(list(case.rows), columns=("answer",), shuffle_seed=seed)
    reward = scorer(name="reward", concurrency=case.calls)(case.reward)
    generator = Generator(model, group_size=GROUP_SIZE, max_tokens=case.max_tokens)
    trainer = Trainer(
        model,
        loss=aipo,
        prompts_per_step=case.prompts_per_step,
        lr=case.lr,
        normalize="rollouts",
        max_grad_norm=GRAD_CLIP,
        checkpoint_every=case.eval_every or None,
    )
    trainer(advantage(reward(generator(graph.source(prompts)))))
    graph.feedback(trainer.weights, generator, max_staleness=max_staleness)
    with tempfile.TemporaryDirectory() as runs:
        result = run(graph, steps=total_steps(system, case), seed=seed, runs=runs, quiet=True)
        ended = time.time()
        if not result.verdict.clean:
            raise RuntimeError(
                f"the ledger of the run does not hold: {result.verdict.line}; see dataflow verify"
            )
        return Measured(
            startup_s=_first_step_ended(result) - born,
            wall_s=ended - born,
            ends=[line["seconds"] for line in result.metrics],
            lengths=_lengths(result, total_steps(system, case)),
            accuracies=_checkpoint_accuracies(result, case, seed, threads),
            efficiency=result.efficiency,
        )


def _first_step_ended(result: Any) -> float:
    """By time.time(); the first rollouts file is written right after the first step."""
    from dataflow.folder.run_folder import RunFolder

    return float(RunFolder.open(result.folder).rollouts_of().step_file(1).stat().st_mtime)


def _lengths(result: Any, steps: int) -> list[list[int]]:
    """Completion tokens of every trained rollout, by step."""
    import numpy as np

    from dataflow.folder.run_folder import RunFolder
    from dataflow.records import MASK

    folder, lengths = RunFolder.open(result.folder), []
    for step in range(1, steps + 1):
        masks = folder.rollouts_of().read(step).column(MASK).combine_chunks()
        mask = masks.values.to_numpy(zero_copy_only=False).astype(np.int64)
        lengths.append(np.add.reduceat(mask, masks.offsets.to_numpy()[:-1]).tolist())
    return lengths


def _checkpoint_accuracies(
    result: Any, case: Case, seed: int, threads: int
) -> list[tuple[int, float]]:
    """(steps, accuracy) of the policy before training and of every checkpoint."""
    if not case.eval_every:
        return []
    import torch

    from bench.end_to_end.plain_loop import accuracy, load
    from dataflow.folder.run_folder import RunFolder

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    checkpoints = RunFolder.open(result.folder).checkpoints
    folders: list[tuple[int, Path]] = [(0, case.policy)]
    folders += [(step, checkpoints.folder(step)) for step in sorted(checkpoints.steps())]
    return [
        (step, accuracy(*load(folder), case.held_out, case.reward, case.max_tokens))
        for step, folder in folders
        if step % case.eval_every == 0
    ]


def _scores(
    case: Case, pool: ThreadPoolExecutor, completions: list[str], rows: list[Row]
) -> list[float]:
    answers = [row["answer"] for row in rows]
    return list((pool.map if case.calls > 1 else map)(case.reward, completions, answers))


def _is_due(watch: Stopwatch, case: Case) -> bool:
    return bool(case.eval_every) and watch.steps % case.eval_every == 0


def _evaluate(watch: Stopwatch, model: Any, tokenizer: Any, case: Case) -> None:
    """Held-out accuracy of the policy as it is now, where the case asks for it."""
    if case.eval_every:
        from bench.end_to_end.plain_loop import accuracy

        watch.evaluate(
            lambda: accuracy(model, tokenizer, case.held_out, case.reward, case.max_tokens)
        )


def _forever(rows: tuple[Row, ...], seed: int) -> Iterator[Row]:
    order = random.Random(seed)
    shuffled = list(rows)
    while True:
        order.shuffle(shuffled)
        yield from shuffled
