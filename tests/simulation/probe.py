"""What operators tell the world of themselves, and the laws that are checked there and then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dataflow.records import GROUP_ID, POSITION, VERSIONS
from dataflow.staleness import oldest_versions

from .actors import TRAINED, fails
from .laws import check
from .process import Process

if TYPE_CHECKING:
    from .world import World


class Probe:
    """In place of the log of one process."""

    watches_admission = True

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        self.random, self.clock, self.disk = world.random, world.clock, world.disk

    def may_write(self, process: Process) -> None:
        """Raises for one whose words the ledger does not take."""
        self._world.room.may_write(process)

    @property
    def _is_nobodys(self) -> bool:
        """Whether another attempt has taken its place: what it does then counts nowhere, and it
        cannot commit.
        """
        return self._world.room.is_fenced(self._process)

    def point(self) -> None:
        """The process may die here."""
        self._process.point()

    def call_back(self, due: float) -> None:
        """Something is ready then."""
        self.clock.after(max(0.0, due - self.clock.now), self._process.wake)

    def recorded(self, step: int) -> pa.Table | None:
        """The rows of a step that was made, None where its file is missing."""
        rollouts = self._world.folder.rollouts_of()
        return rollouts.read(step) if rollouts.step_file(step).exists() else None

    # the generator

    def starts(self, source: str, group: int, least: int, version: int) -> None:
        """A group starts to be generated: not again where it is kept, and not too far ahead of the
        trainer.
        """
        world, shape = self._world, self._world.shape
        if self._is_nobodys:
            return
        check(
            version >= least,
            f"group {group} of '{source}' starts under version {version} instead of {least}",
        )
        if source != TRAINED:
            world.say(self._process.name, f"starts group {group} of {source}")
            return
        world.say(self._process.name, f"starts group {group}")
        if group in world.trained or group in world.given_up:
            return  # it had gone to another replica too, before its source died
        given_up = sum(
            other in world.given_up or fails(other, shape.filters) for other in range(group + 1)
        )
        step = (group - given_up) // shape.prompts_per_step
        ahead = step > version + shape.max_staleness and self.watches_admission
        check(not ahead, f"group {group} of step {step + 1} starts under version {version}")
        check(
            group not in world.kept,
            f"group {group} is generated again, though it was finished and kept",
        )

    def adopted(self, before: int, after: int) -> None:
        """A reader took a version that is recorded, and none older than it had."""
        self._world.say(self._process.name, f"adopts version {after} after {before}")
        check(after >= before, f"a reader went back from version {before} to {after}")

    def reads(self, version: int, held: Sequence[int]) -> None:
        """Under weights of a version tokens are drawn: they are what was published."""
        known = self._world.contents.get(version)
        check(held[0] == version, f"a reader holds version {held[0]} and calls it {version}")
        check(
            known is None or held[1] == known,
            f"a reader holds another version {version} than was published",
        )

    # the evaluation

    def judges(self, step: int, rows: pa.Table) -> None:
        """A round is complete, and about to be recorded."""
        self._world.say(self._process.name, f"judges the round of step {step}")
        if not self._is_nobodys:
            self._world.rounds.judge(step, rows)

    def recorded_round(self, node: str, step: int, groups: Mapping[str, Iterable[int]]) -> None:
        """It is recorded."""
        self._world.rounds.record((self._world.part, self._process.attempt), step, groups)

    # the trainer

    def begins_step(self) -> None:
        """All groups of a step are there."""
        self._world.strike_host(self._process)

    def may_end(self) -> bool:
        """Whether a trainer that has made its steps may say so."""
        return self._world.may_end()

    def publishes(self, version: int, content: int) -> None:
        """A version is offered: the same content whenever its number is."""
        self._world.say(self._process.name, f"publishes version {version}")
        if self._is_nobodys:
            return
        known = self._world.contents.setdefault(version, content)
        check(known == content, f"version {version} is published again with another content")
        newest = self._world.newest_committed
        check(version == newest, f"version {version} is published after {newest} was recorded")

    def commits(self, step: int, content: int, rows: pa.Table, groups: Sequence[int]) -> None:
        """A step is about to be recorded: whole groups, none of them for the second time, none too
        old.
        """
        world, size = self._world, self._world.shape.group_size
        world.say(self._process.name, f"commits step {step} of groups {groups}")
        self._about_to_train = list(groups)
        if self._is_nobodys:
            return
        check(
            step == world.newest_committed + 1,
            f"step {step} is committed after {world.newest_committed}",
        )
        check(
            list(groups) == sorted(set(groups)), f"step {step} trains groups {groups} out of order"
        )
        twice = [group for group in groups if group in world.trained]
        last = max(world.trained, default=-1)
        check(not twice, f"groups {twice} are trained again at step {step}")
        check(groups[0] > last, f"step {step} trains groups {groups} after group {last}")
        check(
            rows.column(GROUP_ID).to_pylist() == [g for g in groups for _ in range(size)],
            "a group has lost rows",
        )
        check(
            rows.column(POSITION).to_pylist() == [*range(size)] * len(groups),
            "a group has lost a rollout",
        )
        oldest = int(oldest_versions(rows.column(VERSIONS)).min())
        age = step - 1 - oldest
        check(age <= world.shape.max_staleness, f"step {step} trains tokens {age} versions old")

    def committed(self, node: str, step: int, **facts: Any) -> None:
        """It is recorded."""
        check(
            not self._is_nobodys,
            f"attempt {self._process.attempt} of '{node}' commits step {step}, and is another's",
        )
        self._world.newest_committed = step
        self._world.trained.update(dict.fromkeys(self._about_to_train, step))
        self._world.given_up.update(dict.fromkeys(facts["dropped"], step))

    def gave_up(self, node: str, source: str, reasons: Mapping[int, str], *, step: int) -> None:
        """Groups are recorded as dropped before their step is."""
        self._world.given_up.update(dict.fromkeys(reasons, step))

    def rolled_back(self, step: int) -> None:
        """Steps after this one are taken back, because their rows are lost."""
        world = self._world
        world.newest_committed = step
        world.trained = {group: at for group, at in world.trained.items() if at <= step}
        world.given_up = {group: at for group, at in world.given_up.items() if at <= step}
        world.contents = {
            version: content for version, content in world.contents.items() if version <= step
        }
