"""How long a run waits, for what: every deadline that a user may have to change, in one place."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from dataflow.errors import DeadlineError, KnobCheck

LOAD_BYTES_PER_S, EXCHANGE_BYTES_PER_S, SEND_BYTES_PER_S = 0.5e9, 1e9, 0.1e9
"""Slow rates: of a host's disk, of links between a trainer's ranks, of a link to a reader."""
COMPILE_S = 300.0
"""For a first compile of a model's layers, with a cold cache."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often workers may fail, and how long to wait before each restart."""

    first_s: float = 0.25
    """Before the first restart of a worker; doubled for each one after it."""
    most_s: float = 30.0
    """Before any restart."""
    quiet_s: float = 30.0
    """A worker that has worked for so long since its last restart, or until the run made progress,
    begins again at `first_s`. A host that has been back for so long gets the workers that the plan
    has there."""
    of_one: int = 5
    """Failures of one worker, with no progress of the run in between, that end the run."""
    of_one_s: float = 3600.0
    """Those longer ago count no more; long, since one that dies in each step may take minutes to
    come so far again."""
    of_all: int = 60
    """Failures of all workers, whatever was done in between, that end the run."""
    of_all_s: float = 600.0
    """Those longer ago count no more."""


@dataclass(frozen=True, kw_only=True)
class Limits(metaclass=KnobCheck):
    """Deadlines of a run. Seconds in which it is stopped (Ctrl-Z) count for none of them."""

    start_s: float = 300.0
    """From the first fork until every worker is ready, and for each restart; a run adds what its
    models take to load (`for_models`)."""
    hang_s: float = 15.0
    """Without a heartbeat, a worker counts as hanging, and a host as lost."""
    host_s: float = 600.0
    """For a host to join, where those that are left have no room for the workers of one that was
    lost."""
    stopped_s: float = 1.0
    """A worker that somebody has stopped (SIGSTOP) is let go on after so long."""
    stuck_s: float = 600.0
    """In one slice of work, a worker counts as stuck, though it has a heartbeat."""
    asleep_s: float = 120.0
    """The same where it has computed nothing in all that time, nor has any process that it has
    started."""
    exchange_s: float = 120.0
    """For one exchange between the ranks of a worker: most of it waits for the slowest; a run adds
    what its models take to be gathered and compiled."""
    transfer_s: float = 120.0
    """For one version to get from all ranks of a trainer to all ranks of a reader, over gloo or
    NCCL; a run adds what its bytes take."""
    checkpoint_s: float = 1800.0
    """For a checkpoint to be on the disk, beside the steps that are made meanwhile."""
    copy_s: float = 60.0
    """For an address that takes no copies of checkpoints: a run waits so long for it at its end;
    before, it is told of that often."""
    track_s: float = 60.0
    """A tracker that is silent for so long in one call is ended, while the run goes on; and a run
    waits so long at its end for trackers to take in what is left."""
    track_again_s: float = 600.0
    """Before a tracker that failed is tried again, at most."""
    stop_s: float = 10.0
    """For workers to wind down before they are killed."""
    adopt_s: float = 60.0
    """When the scheduler has died, workers go on for so long and wait for another one; then they
    finish the step under way, write a checkpoint and end."""
    silent_s: float = 30.0
    """With a standby, a scheduler that lives, but was not heard for so long, is replaced: it was
    stopped (SIGSTOP), or hangs. What Ctrl-Z takes does not count. Below `adopt_s`, so that the
    workers do not notice."""
    drain_s: float = 120.0
    """For the step under way and its checkpoint, after the user asked to stop, or nobody took the
    workers over."""
    stall_s: float = 300.0
    """With nothing moving (rows, tokens, steps) and nobody at work, before a warning; twice that
    ends the run."""
    slice_s: float = 1800.0
    """The same while somebody is at work: a model that loads, a first compile, a long step."""
    patience: Patience = field(default_factory=Patience)
    """With workers that die again and again."""

    def for_models(self, model_bytes: int, sent_bytes: int, *, compiles: bool) -> "Limits":
        """With what models of this size take beside the defaults, at slow rates. A figure that
        differs from its default is the user's, and stays.

        model_bytes: of the largest. sent_bytes: of a version, the most that a rank takes in.

        >>> Limits(transfer_s=5.0).for_models(10**9, 10**9, compiles=True).exchange_s
        421.0
        """
        more = {
            "start_s": model_bytes / LOAD_BYTES_PER_S,
            "exchange_s": model_bytes / EXCHANGE_BYTES_PER_S + COMPILE_S * compiles,
            "transfer_s": sent_bytes / SEND_BYTES_PER_S,
        }
        usual = Limits()
        return replace(
            self,
            **{
                name: getattr(self, name) + seconds
                for name, seconds in more.items()
                if getattr(self, name) == getattr(usual, name)
            },
        )

    @property
    def settle_s(self) -> float:
        """For an update to wait until readers have taken the weights that it changes, where these
        are sent themselves; in an exchange between ranks.
        """
        return min(self.transfer_s, self.exchange_s / 2)

    @property
    def return_s(self) -> float:
        """For a worker that is started again until the scheduler gives it up."""
        return max(
            self.patience.of_one_s, self.patience.of_one * (self.start_s + self.patience.most_s)
        )


def starts_too_long(limits: Limits, folder: str, late: Collection[str]) -> DeadlineError:
    """Of a run whose workers are not all ready."""
    return DeadlineError(
        f"the scheduler waited {limits.start_s:.0f} s for {late} to start; see their logs in"
        f" {folder}/logs"
    )


def joins_too_long(limits: Limits, folder: str, name: str, missing: object) -> DeadlineError:
    """Of a worker that joins a run."""
    return DeadlineError(
        f"the scheduler waited {limits.start_s:.0f} s for '{name}' to join, which waits for"
        f" {missing}; see {folder}/logs/{name}.log, or raise Limits.start_s"
    )


def no_host_for_too_long(limits: Limits, folder: str, needs: str) -> DeadlineError:
    """Of a run that has lost a host. needs: who needs what, and what there is."""
    return DeadlineError(
        f"the scheduler waited {limits.host_s:.0f} s for a host that joins, as {needs}; have more"
        f" hosts join and resume the run, or raise Limits.host_s ({folder})"
    )


def drains_too_long(limits: Limits, folder: str) -> DeadlineError:
    """Of a run that was asked to stop."""
    return DeadlineError(
        f"the scheduler waited {limits.drain_s:.0f} s for the step under way to end; it stops"
        f" without it, and the last checkpoint in {folder} is good"
    )
