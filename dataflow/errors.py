"""Every error of the engine, as one tree.

    DataflowError
    ├── GraphError (ValueError)    a graph or a knob cannot be right; raised before anything runs
    │   └── FlagError              a flag, or a file of flags, cannot be read
    ├── RecordError (ValueError)   rows do not have the columns or types that were promised
    └── RunError                   a run could not go on
        ├── OperatorError          an operator failed; names the node, the user's file and the line
        │   └── Unusable           the user's functions or data give what can never be used
        ├── WorkerDied             a worker process ended or stopped answering
        ├── DeadlineError          a wait reached its deadline; names who waited for whom
        ├── WorldFailed            raised by a user's function: something outside failed; try again
        └── Replaced               another scheduler, or attempt of a worker, has taken its place

Messages have three parts: what is wrong, what was found, what to do.
"""

import contextlib
import dataclasses
import difflib
import errno
import functools
import inspect
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, ParamSpec, TypeGuard, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DataflowError(Exception):
    """Anything this engine raises on purpose.

    >>> from dataflow import DataflowError, Graph
    >>> try:
    ...     Graph("a b")
    ... except DataflowError as error:
    ...     print(str(error).partition(";")[0])
    a graph's name becomes a folder, but 'a b' cannot
    """

    is_lasting: ClassVar[bool] = False
    """Whether a process that is started anew would meet it again: settings, data, models and
    functions are as they were."""


class GraphError(DataflowError, ValueError):
    """A graph or a knob that cannot be right, found before anything runs.

    >>> from dataflow import GraphError, Model
    >>> try:
    ...     Model("policies/tiny", head="lmm")
    ... except GraphError as error:
    ...     print("refused:", isinstance(error, ValueError))
    refused: True
    """

    is_lasting = True


def too_long_name(error: OSError) -> GraphError | None:
    """The refusal of a path that is longer than the file system takes; None for another error."""
    if error.errno != errno.ENAMETOOLONG:
        return None
    name = str(error.filename)
    return GraphError(
        f"no file or folder can have a name that long; found one of {len(name):,} characters,"
        f" {name[:40]!r}...; give a shorter one"
    )


class RecordError(DataflowError, ValueError):
    """Rows that do not have the promised columns or types."""

    is_lasting = True


class RunError(DataflowError, RuntimeError):
    """A run that could not go on.

    >>> from dataflow import RunError, verify
    >>> try:
    ...     verify("runs/nowhere")
    ... except RunError as error:
    ...     print("nowhere" in str(error))
    True
    """


class OperatorError(RunError):
    """An operator failed; the message names the node and the line of the user's function."""


class Unusable(OperatorError):
    """What the user's functions or data give cannot be used; the message says which, and why."""

    is_lasting = True


class WorkerDied(RunError):
    """A worker process ended, or stopped answering, while the run needed it."""


class DeadlineError(RunError, TimeoutError):
    """A wait reached its deadline; the message names who waited for whom."""


class WorldFailed(RunError):
    """What a scorer raises where something outside failed: a judge, a network, a service that is
    too busy.

    The call is made again, a few times; a rollout for which it still fails has the cause `world`.

    >>> from dataflow import WorldFailed, scorer
    >>> @scorer(retries=5)
    ... def judged(completion: str) -> float:
    ...     raise WorldFailed("the judge is being restarted", after_s=2.0)
    """

    def __init__(self, found: str, *, after_s: float | None = None) -> None:
        """after_s: seconds after which it may be tried again, where that is known."""
        super().__init__(found)
        self.after_s = after_s


class Replaced(RunError):
    """A scheduler, or a worker, finds that another one is in its place; it must touch nothing of
    the run any more.
    """


@contextlib.contextmanager
def boundary(node: str, doing: str) -> Iterator[None]:
    """Attribute whatever is raised inside to `node`: the one place where errors are attributed."""
    try:
        yield
    except DataflowError as error:
        if f"'{node}'" in str(error):
            raise
        raise type(error)(f"'{node}': {error}") from error
    except Exception as error:
        raise OperatorError(
            f"'{node}' failed while {doing}: {type(error).__name__}: {error} (at {where(error)}); "
            "its log has the whole traceback"
        ) from error


def where(error: BaseException) -> str:
    """File and line that raised `error`, the innermost frame outside installed packages if there is
    one.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "unknown line"


def nearest(name: str, names: Iterable[str]) -> str:
    """'; did you mean ...?' where something known is spelled much like `name`, else nothing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Whether a knob's value is a whole number, no bool, and at least so much."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether a knob's value is a number: no bool, and not NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


class KnobCheck(type):
    """Turns a knob that is unknown, or missing, into a GraphError that names the nearest one."""

    def __call__(cls, *args: Any, **knobs: Any) -> Any:
        """Make the declaration, its arguments checked first."""
        fields = [item.name for item in dataclasses.fields(cls) if item.init]  # type: ignore[arg-type]
        _refuse_unknown(cls.__name__, inspect.signature(cls.__init__), fields, (None, *args), knobs)  # type: ignore[misc]
        return super().__call__(*args, **knobs)


def checked(function: Callable[P, T], instead: str = "") -> Callable[P, T]:
    """The same function; a GraphError, not a TypeError, where it is called with what it does not
    take.

    instead: what to write, where that is no call with what it takes.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **knobs: P.kwargs) -> T:
        _refuse_unknown(function.__name__, signature, signature.parameters, args, knobs, instead)
        return function(*args, **knobs)

    return call


def _refuse_unknown(
    name: str,
    signature: inspect.Signature,
    fields: Iterable[str],
    args: tuple[Any, ...],
    knobs: Mapping[str, Any],
    instead: str = "",
) -> None:
    for knob in knobs:
        if knob not in fields:
            raise GraphError(
                f"{name} has no knob '{knob}' (got {knob}={knobs[knob]!r:.60}){hint(knob, fields)}"
            )
    try:
        signature.bind(*args, **knobs)
    except TypeError as error:
        raise GraphError(
            f"{name} takes other arguments: {error}; write {instead or name + _shown(signature)}"
        ) from None


def _shown(signature: inspect.Signature) -> str:
    """The required parameters, and a hint that there are more."""
    parameters = [
        parameter for parameter in signature.parameters.values() if parameter.name != "self"
    ]
    needed = [
        parameter.name
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        else f"{parameter.name}=..."
        for parameter in parameters
        if parameter.default is parameter.empty
    ]
    return f"({', '.join([*needed, *(['...'] if len(needed) < len(parameters) else [])])})"


def called_here(knob: str, names: Collection[str]) -> str:
    """What is called `knob` in another system, by its name among those that are known here; empty:
    none is.
    """
    return next((name for name, _ in _PLACES.get(knob, ()) if name in names), "")


def hint(knob: str, known: Iterable[str]) -> str:
    """What to write for a knob that is not known: as in a refusal, behind what was found.

    >>> hint("learning_rate", ["lr", "loss"]), hint("num_generations", ["lr", "loss"])
    ("; did you mean 'lr'?", '; that is Generator(group_size=...)')
    """
    names = list(known)
    alike = [knob] if knob in _PLACES else difflib.get_close_matches(knob, names, n=1)
    for alias in alike or difflib.get_close_matches(knob, _PLACES, n=1, cutoff=0.8):
        own = alias if alias in names else called_here(alias, names)
        return f"; did you mean '{own}'?" if own else f"; that is {_PLACES[alias][0][1]}"
    near = difflib.get_close_matches(knob, names, n=_NEAREST, cutoff=0.0)
    return f"; the nearest that it has are {near}" if near else "; it has none"


_NEAREST = 4
"""Knobs that are named where none is spelled like the given one."""
OTHER_NAMES: Mapping[str, str] = {
    "Trainer(lr=...)": "learning_rate actor_lr critic_lr actor_learning_rate optim_lr",
    "Trainer(betas=...)": "adam_beta1 adam_beta2 adam_betas optim_betas",
    "Trainer(eps=...)": "adam_epsilon adam_eps",
    "Trainer(weight_decay=...)": "adam_weight_decay",
    "Trainer(warmup_steps=...)": (
        "warmup_ratio lr_warmup_steps lr_warmup_steps_ratio lr_warmup_ratio num_warmup_steps"
    ),
    "Trainer(schedule=...)": (
        "lr_scheduler_type lr_scheduler_kwargs lr_scheduler lr_schedule scheduler warmup_style"
    ),
    "Trainer(decay_steps=...)": "lr_decay_steps lr_decay_iters",
    "Trainer(min_lr=...)": "min_lr_ratio lr_min",
    "Trainer(max_grad_norm=...)": "grad_clip clip_grad clip_grad_norm gradient_clipping max_norm",
    "Trainer(prompts_per_step=...)": (
        "train_batch_size per_device_train_batch_size gradient_accumulation_steps batch_size"
        " generation_batch_size gen_batch_size rollout_batch_size global_batch_size"
        " ppo_mini_batch_size mini_batch_size num_mini_batches"
    ),
    "Trainer(micro_batch_tokens=...)": (
        "max_tokens_per_gpu ppo_max_token_len_per_gpu log_prob_max_token_len_per_gpu"
        " use_dynamic_bsz forward_max_token_len_per_gpu ppo_micro_batch_size"
        " ppo_micro_batch_size_per_gpu micro_batch_size micro_batch_size_per_gpu"
        " log_prob_micro_batch_size_per_gpu micro_train_batch_size"
    ),
    "Trainer(loss=...)": "loss_type loss_fn loss_mode policy_loss",
    "Trainer(normalize=...)": "loss_agg_mode",
    "Trainer(whiten=...)": (
        "normalize_advantages normalize_advantage whiten_advantages whiten_rewards"
    ),
    "Trainer(gradient_checkpointing=...)": (
        "gradient_checkpointing_enable enable_gradient_checkpointing "
        "use_gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing"
    ),
    "Trainer(compile=...)": (
        "torch_compile torch_compile_backend torch_compile_mode use_torch_compile"
    ),
    "Trainer(offload=...)": (
        "adam_offload param_offload optimizer_offload grad_offload offload_policy cpu_offload "
        "offload_params"
    ),
    "Trainer(checkpoint_every=...)": (
        "save_steps save_freq save_strategy save_interval checkpoint_interval"
    ),
    "Trainer(save_total_limit=...)": (
        "max_actor_ckpt_to_keep max_critic_ckpt_to_keep max_num max_ckpt_num"
    ),
    "Trainer(dp_replicate=...)": "fsdp_size",
    "Generator(group_size=...)": (
        "num_generations num_return_sequences n rollout_n n_samples_per_prompt n_samples "
        "num_samples rloo_k samples_per_prompt"
    ),
    "Generator(max_tokens=...)": (
        "max_completion_length max_new_tokens max_response_length response_length "
        "max_completion_tokens generate_max_len max_gen_len"
    ),
    "Generator(context_tokens=...)": (
        "max_len max_model_len max_prompt_length max_length max_seq_length "
        "vllm_max_model_length prompt_length"
    ),
    "Generator(temperature=...)": "rollout_temperature sampling_temperature temp",
    "Generator(slots=...)": "max_num_seqs max_running_requests max_batch_size",
    "Generator(cache_bytes=...)": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "Generator(tensor_parallel=...)": (
        "tensor_model_parallel_size tensor_parallel_size vllm_tensor_parallel_size tp_size"
    ),
    "Generator(engine=...)": (
        "rollout_name num_engines use_vllm vllm_mode vllm_model_impl rollout_backend"
    ),
    "Generator(weights=...)": "quantization load_in_8bit load_in_4bit",
    "Generator(stop=...)": "stop_strings stop_token_ids eos_token_id",
    "Generator(compile=...)": "enforce_eager cudagraph_mode",
    "Generator(chat=...)": "apply_chat_template chat_template",
    "Model(dtype=...)": "param_dtype torch_dtype model_dtype mixed_precision bf16 fp16",
    "Model(source)": "path model_name_or_path pretrained_model_name_or_path model_path",
    "Model(revision=...)": "model_revision",
    "Model(lora=...)": "use_peft peft_config lora_path",
    "LoRA(rank=...)": "r lora_r lora_rank",
    "LoRA(alpha=...)": "lora_alpha",
    "LoRA(targets=...)": "target_modules lora_target_modules",
    "run(graph, seed=...)": "seed full_determinism",
    "Prompts(source)": (
        "prompt_dataset train_files train_dataset dataset dataset_name data_files data_path"
        " prompt_data"
    ),
    "Prompts(source), read by Evaluate": "val_files eval_dataset",
    "Prompts(limit=...)": "max_samples train_max_samples val_max_samples num_prompts",
    "Prompts(shuffle_seed=...)": "shuffle shuffle_dataset data_seed seed",
    "Prompts(epochs=...)": "num_episodes num_train_epochs total_epochs num_epochs",
    "Prompts(prompt_column=...)": "prompt_key input_key",
    "Prompts(columns=...)": "label_key reward_fn_key answer_key answer_column",
    "Prompts(split=...)": "dataset_split dataset_train_split train_split",
    "Prompts(config=...)": "dataset_config dataset_config_name subset",
    "run(graph, steps=...)": "max_steps total_training_steps num_steps train_steps",
    "run(graph, runs=...)": "output_dir default_local_dir save_path logging_dir",
    "run(graph, track=...)": "report_to log_with logger use_wandb",
    "run(graph, resume=...)": "resume_from_checkpoint resume_mode resume_from_path",
    "run(graph, gpus=...)": "n_gpus_per_node num_gpus nnodes",
    "run(graph, on=inline())": "inline",
    "Evaluate(every_steps=...), with prompts of its own": (
        "eval_steps test_freq eval_strategy eval_interval"
    ),
    "g.feedback(..., max_staleness=...)": (
        "async_enable async_queue_size staleness num_iterations steps_per_generation ppo_epochs"
        " async_steps staleness_threshold max_off_policy_steps off_policy_steps"
    ),
    "Trainer(loss=with_kl(loss, beta=...))": (
        "init_coef beta kl_coef kl_beta kl_loss_coef use_kl_loss kl_loss_type "
        "use_kl_in_reward init_kl_coef kl_penalty"
    ),
    "Trainer(loss=with_entropy(loss, weight=...))": (
        "entropy_coeff entropy_coef ent_coef entropy_weight"
    ),
    "Trainer(loss=partial(grpo, clip_low=...))": (
        "eps_clip_low_high epsilon clip_ratio clip_ratio_low clip_range "
        "cliprange eps_clip epsilon_low eps_clip_low"
    ),
    "Trainer(loss=partial(grpo, clip_high=...))": "epsilon_high clip_ratio_high eps_clip_high",
    "Trainer(loss=partial(aipo, rho=...))": (
        "vllm_importance_sampling_clip_max is_correction_threshold importance_sampling_cap"
        " vllm_importance_sampling_cap tis_imp_ratio_cap rollout_is_threshold"
    ),
    "a scorer, applied to the generator's stream": (
        "remote_url remote_rm_url reward_funcs reward_func reward_function "
        "reward_fn reward_model custom_reward_function compute_score"
    ),
    "combine({...}) of operators.rewards": "reward_weights",
    "a scorer of operators.credit, applied to the reward's stream": (
        "adv_estimator scale_rewards gamma lam gae_lambda norm_adv_by_std_in_grpo"
    ),
    "Logprobs(model.frozen()), applied to the stream": "ref_model reference_model sync_ref_model",
    "in the model's folder, and read from there": "tokenizer processing_class tokenizer_name",
}
"""By how a knob is written here: what TRL, verl, OpenRLHF, slime, AReaL and transformers call it,
or have called it."""
FLAG_NAMES: Mapping[str, str] = {
    "LoRA(rank=...)": "lora_rank",
    "LoRA(alpha=...)": "lora_alpha",
    "LoRA(targets=...)": "lora_targets",
    "Model(lora=...)": "lora",
    "Model(source)": "policy",
    "Prompts(source)": "prompts",
    "Prompts(prompt_column=...)": "question",
    "Prompts(columns=...)": "answer",
    "Prompts(source), read by Evaluate": "held_out",
    "Generator(weights=...)": "generator_weights",
    "Evaluate(every_steps=...), with prompts of its own": "eval_every",
    "Trainer(loss=with_kl(loss, beta=...))": "kl",
    "Trainer(loss=with_entropy(loss, weight=...))": "entropy",
    "a scorer, applied to the generator's stream": "reward",
}
"""By how a knob is written: the flag of graphs over text files, where that has another name."""
_PLACES: dict[str, list[tuple[str, str]]] = {}
"""By other name: the knob here, where it is one, and how it is written."""
for _place, _names in OTHER_NAMES.items():
    _knob = re.search(r"(\w+)(?:=\.\.\.|\)$)", _place)
    for _name in _names.split():
        _PLACES.setdefault(_name, []).append((_knob[1] if _knob else "", _place))
        if _place in FLAG_NAMES:
            _PLACES[_name].append((FLAG_NAMES[_place], _place))
