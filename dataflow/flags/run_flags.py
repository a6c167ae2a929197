"""The flags of every graph's program: where a run goes, what it leaves, how to look at it
before."""

from pathlib import Path

from dataflow.flags.declared import Flag
from dataflow.records import MESSAGE_BYTES

WHERE = "where it runs"
OUTPUT = "what it leaves, and who is told"
BEFORE = "before a run: look at it, foresee it"
EXPERT = "for experts"

RUN_FLAGS = (
    Flag(
        name="steps",
        kind=int | None,
        default=None,
        help="optimiser steps; until the prompts end, or Ctrl-C, when left out",
    ),
    Flag(
        name="seed",
        kind=int,
        default=0,
        help="of the prompts' order, sampling and all else that is random",
    ),
    Flag(
        name="config",
        kind=Path | None,
        default=None,
        help=(
            "YAML or TOML file of flags, as lr: 1e-6; those of the command line go before; a run"
            " leaves its own as config.yaml in its folder"
        ),
    ),
    Flag(
        name="gpus",
        default="",
        heading=WHERE,
        help=(
            "accelerators by node, over all hosts, as generator=6,trainer=2; with"
            " generator=8,trainer=generator they take turns; shared: all nodes take turns on all;"
            " with --foresee auto and auto:cost choose"
        ),
    ),
    Flag(
        name="replicas",
        default="",
        heading=WHERE,
        help="copies of a node on the CPU, as generator=2",
    ),
    Flag(
        name="ranks",
        default="",
        heading=WHERE,
        help="processes that share out a trainer's model on the CPU, as trainer=2",
    ),
    Flag(
        name="on",
        default="",
        heading=WHERE,
        help=(
            "hosts: ray, slurm, torchrun, or local:3 for three agents here; this machine when"
            " left out"
        ),
    ),
    Flag(
        name="place",
        default="",
        heading=WHERE,
        help=(
            "hosts of a node's replicas, in turn, as generator=a+b,trainer=c; chosen when left out"
        ),
    ),
    Flag(
        name="listen",
        default="",
        heading=WHERE,
        help=(
            "address of this machine for edges and control, over tcp with keys; ipc alone when"
            " left out"
        ),
    ),
    Flag(
        name="inline",
        kind=bool,
        default=False,
        heading=WHERE,
        help="one process, one thread, bit-exact",
    ),
    Flag(
        name="runs", kind=Path, default=Path("runs"), heading=OUTPUT, help="folder of run folders"
    ),
    Flag(
        name="resume",
        kind=Path | None,
        default=None,
        heading=OUTPUT,
        help="a run folder in which to go on, with the same flags; or use dataflow resume",
    ),
    Flag(
        name="keep_steps",
        kind=int | None,
        default=None,
        heading=OUTPUT,
        help="keep the rollouts of the last steps alone, and what recovery and replay need",
    ),
    Flag(
        name="checkpoint_to",
        kind=str | None,
        default=None,
        heading=OUTPUT,
        help=(
            "address or path to which checkpoints are copied, as s3://bucket/folder; see dataflow"
            " resume --from"
        ),
    ),
    Flag(
        name="track",
        kind=tuple[str, ...],
        default=(),
        repeats=True,
        heading=OUTPUT,
        help=(
            "tell the run to wandb, tensorboard, trackio, mlflow or opentelemetry too, or to"
            " my_module:MyTracker; may be given several times"
        ),
    ),
    Flag(
        name="metrics_port",
        kind=int | None,
        default=None,
        heading=OUTPUT,
        help="serve the run's figures to Prometheus at this port of this machine",
    ),
    Flag(
        name="quiet",
        kind=bool,
        default=False,
        heading=OUTPUT,
        help="no live view and no summary; what goes wrong is still told, on standard error",
    ),
    Flag(name="explain", kind=bool, default=False, heading=BEFORE, help="print the plan and stop"),
    Flag(
        name="foresee",
        default="",
        heading=BEFORE,
        help=(
            "devices that one could rent, as 1xH100 or 2xcpu, or a run folder to take figures from:"
            " print what a step would take there, and stop; --gpus deals them out, or the shortest"
            " step does"
        ),
    ),
    Flag(
        name="draw",
        kind=Path | None,
        default=None,
        heading=BEFORE,
        help=(
            "draw the graph (.svg, .dot, .mmd or .html), or what is foreseen (.svg or .json), and"
            " stop"
        ),
    ),
    Flag(
        name="workload",
        default="",
        heading=BEFORE,
        help=(
            "to foresee with: tokens, a scorer's seconds, a filter's share and ways to cut a model,"
            " as mean=800,"
            "prompt=200,sigma=0.8,reward.seconds=0.05,reward.drops=0.3,trainer.pipeline=4"
        ),
    ),
    Flag(
        name="constants",
        default="",
        heading=BEFORE,
        help=(
            "to foresee with: a file that dataflow calibrate wrote, or for a generator data-sheets,"
            " serving, kernels"
        ),
    ),
    Flag(
        name="prices",
        default="",
        heading=BEFORE,
        help="to foresee with: of a device for an hour, by kind, as H100=2.5,L40S=1.0",
    ),
    Flag(
        name="weights",
        kind=str | None,
        default=None,
        heading=EXPERT,
        help=(
            "executor of the weight plane: shared_memory, cuda_ipc, gloo, nccl; chosen when"
            " left out"
        ),
    ),
    Flag(
        name="link_gbps",
        kind=float | None,
        default=None,
        heading=EXPERT,
        help="gigabits per second between machines; slow ones carry what changed alone",
    ),
    Flag(
        name="message_bytes",
        kind=int,
        default=MESSAGE_BYTES,
        heading=EXPERT,
        help="most bytes of one message on a data edge; a larger group goes in parts",
    ),
    Flag(
        name="scale",
        default="",
        heading=EXPERT,
        help="replicas of a node from a step on, as 100:generator=3,200:generator=1",
    ),
    Flag(
        name="standby",
        kind=bool,
        default=False,
        heading=EXPERT,
        help="another process takes the scheduler's place should it die",
    ),
)
