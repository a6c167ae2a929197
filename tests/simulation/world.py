"""A whole run in one process: the real scheduler, hosts, loops and transports among simulated
workers.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch

from dataflow.folder import snapshot
from dataflow.folder.ledger import Ledger
from dataflow.folder.live_changes import recorded_swaps
from dataflow.folder.run_folder import RunFolder
from dataflow.history import resume
from dataflow.limits import Limits, Patience
from dataflow.runtime import RunSettings
from dataflow.scheduler.agents import Agents
from dataflow.scheduler.control import Scheduler
from dataflow.scheduler.requests import Scale
from dataflow.scheduler.table import Membership, ProcessState
from dataflow.system.security import RunKeys
from dataflow.worker.host import Settings
from dataflow.worker.messages import NodeCommand, ToWorker
from operators import prompts
from transport.life import Life

from .clock import Clock
from .control_server import Room, SimulatedControlServer, SimulatedHostsControlServer
from .exchange import Exchange, Forks
from .guests import Guests, Swappers
from .hosts import BEGIN, BUILT, Hosts
from .laws import check
from .nemesis import Blackouts, HostTrouble, Nemesis, SchedulerDeaths, Trouble
from .network import SimulatedNetwork, Weather
from .process import Crash, Process
from .product import product
from .rounds import Rounds
from .shape import HOSTED, HOSTS, MEMORY, Shape, machines, made
from .trainer import trained
from .weights import Site
from .worker import SimulatedWorker

LONGEST_S = 120.0
"""Virtual seconds within which a run must be over."""
MOST_EVENTS = 400_000
HANG_S = 4.0
LIMITS = Limits(hang_s=HANG_S, host_s=60.0, patience=Patience(of_one=50, quiet_s=1.0))
KEYS = RunKeys.make()


class World:
    """One run of one seed."""

    def __init__(
        self, seed: int, *, having: Collection[str] | None = None, keep_log: bool = False
    ) -> None:
        """having: the features (see `shape`) of the run; None: those that the seed draws."""
        self.seed, self.random, self.clock = seed, Random(seed), Clock()
        self.log: list[str] | None = [] if keep_log else None
        random = self.random
        self.shape = Shape.drawn(random, having)
        if HOSTS in having if having is not None else Random(f"{seed} {HOSTS}").random() < HOSTED:
            self.shape = self.shape.over_hosts(random)
        self._weather = Weather(
            delay_s=random.choice((1e-4, 1e-3, 1e-2)),
            slow=random.choice((0.0, 0.02, 0.1)),
            damage=0.0,
        )
        self._over_s = random.choice((0.4, 1.0, 3.0))
        self.at_once = random.choice((2, prompts.ROWS_AT_ONCE, prompts.ROWS_AT_ONCE))
        """Prompts that a source issues at once."""
        self._waits_for_guests = random.random() < 0.7
        self.rounds = Rounds(self.shape)
        self.disk: dict[int, int] = {0: 1}
        """Checkpoints: what the weights of a step are; no crash takes them."""
        self.contents: dict[int, int] = {}
        """Of every version that was published."""
        self.newest_committed = 0
        self.trained: dict[int, int] = {}
        """Step by group, on the line that survives."""
        self.given_up: dict[int, int] = {}
        """The same of groups that were given up."""
        self.one_generator = True
        """Whether there is only one, always: no other can have a group that comes to it again."""
        self.part = -1
        """How often the run was taken up again."""
        self.current: Process | None = None
        """Whose turn it is."""
        self.durable: set[int] = set()
        """Groups whose rollouts were finished and written down."""
        self._durable_before: set[int] = set()
        """Those of them that were it when the run was last taken up, so that everybody found
        them."""
        self._guests: Guests | None = None
        self._swappers: Swappers | None = None
        self._checked = 0

    def _clear(self) -> None:
        """A machine room with nobody in it."""
        self.network = SimulatedNetwork(self.clock, self.random, self._weather)
        self.site = Site(self.network)
        self.workers: dict[str, SimulatedWorker] = {}
        self.scheduler: Scheduler | None = None
        self.begun = self._dark = False
        self._schedulers = -1
        """Of this part, before the one that leads it."""
        self.chair = Process("scheduler", self.clock, self.random, pace_s=0.0)
        """Of the scheduler: it takes no turns by itself, but may die."""
        self.chair.alive = True
        hosts = machines(self.shape.hosts)
        exchange: Exchange | Hosts = Exchange(self.network)
        forks: Forks | Hosts = Forks(self.clock, self.random, self._fork)
        if hosts:
            exchange = forks = Hosts(
                self.clock, self.random, self.network, hosts, self._fork, self._end, self._step
            )
        self.room = Room(
            clock=self.clock,
            folder=self.folder.path,
            exchange=exchange,
            forks=forks,
            step=self._step,
            point=lambda: self.chair.point(),
            kill=self._kill,
            told=self._told,
            host_of=self._host_of,
            machines=self.network.machines,
            swappers=lambda: self._swappers,
        )

    def say(self, who: str, what: str) -> None:
        """A line of the log."""
        if self.log is not None:
            self.log.append(f"{self.clock.now:10.5f}  {who}: {what}")

    @property
    def kept(self) -> set[int]:
        """Finished groups that whoever is asked for them must find."""
        return self.durable if self.one_generator else self._durable_before

    def may_end(self) -> bool:
        """Whether nothing is left to see when the trainer is done: joins and leaves that are under
        way.
        """
        assert self.scheduler is not None
        return (
            not self._waits_for_guests
            or self._guests is None
            or self._guests.fulfilled(self.scheduler.table)
        )

    def run(self) -> None:
        """From the scheduler's start to its end; raises Broken."""
        torch.set_num_threads(1)
        path = Path(tempfile.mkdtemp(prefix="simulation-", dir=MEMORY))
        try:
            for below in ("logs", "rollouts", "checkpoints"):
                (path / below).mkdir()
            begin = made(self.shape)
            (path / "ledger.db").write_bytes(begin.ledger)
            for name, content in begin.files.items():
                (path / name).write_text(content)
            self.folder = RunFolder.open(path)
            self.ledger = Ledger.open(self.folder.ledger)
            with product(self):
                self._trouble()
                while not self._part():
                    self._end_all()
            self._final_laws()
        finally:
            self._end_all()
            self.ledger.close()
            shutil.rmtree(path, ignore_errors=True)

    def _trouble(self) -> None:
        clock, random, shape = self.clock, self.random, self.shape
        self.nemesis = Nemesis(
            clock,
            random,
            lambda: self.network,
            self._victims,
            Trouble(hang_s=8.0, over_s=self._over_s),
            self.say,
        )
        nodes = {"generator": shape.generators} | (
            {"reward": shape.scorers} if shape.scorers else {}
        )
        if shape.scales:
            self._guests = Guests(clock, random, nodes, self._request, over_s=self._over_s)
        if shape.swaps:
            self._swappers = Swappers(self, over_s=self._over_s)
        if shape.resumes:
            Blackouts(clock, random, self._everybody, self._go_dark, self.say, over_s=2.0)
        if shape.hosts:
            self._host_trouble = HostTrouble(
                clock,
                random,
                lambda: self.network,
                lambda: self._agents if self.scheduler else None,
                self._everybody,
                self.say,
                over_s=self._over_s,
            )
        if shape.succeeds:
            self._deaths = SchedulerDeaths(
                clock, random, lambda: self.chair, self.say, over_s=self._over_s
            )

    def _victims(self) -> list[Process]:
        """Who may die alone."""
        return [worker.process for worker in self.workers.values()]

    def _everybody(self) -> list[Process]:
        return [self.chair, *(worker.process for worker in self.workers.values())]

    def _of(self, *nodes: str) -> list[Process]:
        """The processes of some nodes."""
        return [
            each.process for each in self.workers.values() if each.name.rpartition("-")[0] in nodes
        ]

    def _on_the_way(self) -> list[Process]:
        """Those that join or leave."""
        assert self.scheduler is not None
        on_the_way = (Membership.JOINING, Membership.LEAVING, Membership.STOPPING)
        records = self.scheduler.table.workers
        return [
            each.process
            for each in self.workers.values()
            if records[each.name].membership in on_the_way
        ]

    def _go_dark(self) -> None:
        self._dark = True

    def _part(self) -> bool:
        """The run from its start, or from where it is taken up, to its end; False: all of it died
        before that.
        """
        self._clear()
        self.part += 1
        try:
            self._run()
        except Crash:
            return False
        return True

    def _run(self) -> None:
        shape, random = self.shape, self.random
        begun = self._take_up() if self.part else None
        if self.part:
            shape = dataclasses.replace(shape, generators=random.choice((1, 2)))
        begin = made(shape)
        self.graph, self.plan = begin.graph, begin.plan
        self.one_generator = shape.generators == 1 and not shape.scales
        settings = Settings(
            folder=str(self.folder.path),
            run=RunSettings(seed=self.seed, steps=shape.steps, limits=LIMITS),
            swaps=recorded_swaps(self.ledger.facts()),
        )
        self.server = self._served()
        self.scheduler = Scheduler(self.graph, self.plan, settings, clock=self.clock)
        if begun is not None:
            self.scheduler.table.run.go_on(begun.steps, begun.rounds)
        left: Mapping[str, Any] = {}
        while not self._serves(self.scheduler, left):
            if self._dark or not self.room.forks.stays:
                raise Crash("all")
            left = self._wait_for_another()
            self.scheduler = Scheduler(
                self.graph,
                self.plan,
                settings,
                clock=self.clock,
                server=self.server,
                snapshot=left,  # type: ignore[arg-type]
            )

    def _serves(self, scheduler: Scheduler, left: Mapping[str, Any]) -> bool:
        """What a scheduler does, to the end of the run; False: it died before that. left: by the
        one before it.
        """
        if not left and self.random.random() < 0.5:
            self.nemesis.strike_soon(0.2, self._victims)
        try:
            scheduler.start()
            self._law_of_adoption(scheduler, left)
            self.begun = True
            self.say("scheduler", "all are ready")
            while not scheduler.table.run.over:
                scheduler.turn(0.25)
                while scheduler.notices:
                    self.say("scheduler", scheduler.notices.pop(0).replace(str(os.getpid()), "1"))
            self.say("scheduler", "the run is over")
            if self.shape.succeeds and self.random.random() < 0.2:
                self._deaths.strike_soon(0.05)
            scheduler.close()
        except Crash:
            self.room.exchange.lose()
            self.room.forks.lose()
            return False
        return True

    def _law_of_adoption(self, scheduler: Scheduler, left: Mapping[str, Any]) -> None:
        """Whoever was at work stays so, whatever becomes of schedulers."""
        for known in left["table"]["workers"] if left else ():
            name, host = known["name"], known["host"]
            worker = self.workers.get(f"{name}@{host}" if host else name)
            if (
                known["process"] == ProcessState.READY
                and worker is not None
                and worker.process.alive
            ):
                state = scheduler.table.workers[name].state
                check(
                    state in ("ready", "left"),
                    f"'{name}' is at work, but {state} for the next scheduler",
                )

    def _wait_for_another(self) -> Mapping[str, Any]:
        """Time passes without a scheduler; then another one takes the workers over. What the last
        one left.
        """
        since, alone_s = self.clock.now, self.random.choice((0.05, 0.5, 5.0)) * self.random.random()
        self.say("scheduler", f"is dead; the next one comes in {alone_s:.3f} s")
        self.clock.after(alone_s, lambda: None)
        while self.clock.now < since + alone_s:
            self._event()
        self.chair = Process("scheduler", self.clock, self.random, pace_s=0.0)
        self.chair.alive = True
        self.server = self._served(self.clock.now - since)
        return snapshot.read(self.folder.path)

    def _served(self, alone_s: float | None = None) -> SimulatedControlServer:
        """The control server of a scheduler. alone_s: how long there was none, before one that
        takes the workers over; None: it is the first.
        """
        room, keeps = self.room, self.shape.succeeds
        if isinstance(room.forks, Forks):
            handed = [] if alone_s is None else room.forks.hand_over()
            return SimulatedControlServer(room, handed, alone_s or 0.0, keeps=keeps)
        self._schedulers += 1
        names = room.forks.names
        agents = Agents(
            "", KEYS, self.folder.path, self._schedulers, hang_s=HANG_S, clock=self.clock
        )
        if alone_s is None:
            agents.assemble(len(names), LONGEST_S)
            agents.build(BEGIN, BUILT, LONGEST_S)
        else:
            agents.take_over(BEGIN, BUILT, names, 1.0)
        return SimulatedHostsControlServer(room, agents, alone_s or 0.0, keeps=keeps)

    def _take_up(self) -> resume.Begun:
        """What `dataflow.runner.run` does before it starts a run again."""
        self.say("scheduler", "takes the run up")
        recorded = resume.RecordedRun.read(self.folder)
        begun = resume.take_up(self.folder, self.graph, recorded, self.shape.steps)
        self.chair.point()
        resumed = [*recorded.config.get("resumed", []), {"from": begun.steps}]
        self.folder.write_json("config.json", {**recorded.config, "resumed": resumed}, flush=False)
        return begun

    def _end_all(self) -> None:
        """All die; what they hold in memory is gone, what is on the disk stays."""
        self.room.forks.closed = True
        for worker in self.workers.values():
            worker.process.die()
        self.chair.die()
        self._durable_before = set(self.durable)
        self.rounds.cut_off()
        if self._guests is not None:
            self._guests.forget()

    def _step(self) -> None:
        """The scheduler waits for the next event."""
        self._event()
        self.chair.point()

    def _event(self) -> None:
        check(self.clock.step(), "the world stands still", self.who_waits)
        check(
            self.clock.events < MOST_EVENTS,
            "messages go back and forth without end",
            self.who_waits,
        )
        check(
            self.clock.now < LONGEST_S,
            f"the run is not over after {LONGEST_S:.0f} s",
            self.who_waits,
        )
        if self.newest_committed != self._checked:
            self._checked = self.newest_committed
            self._ledger_laws()
            self._host_law()
        if self._dark:
            self.say("scheduler", "all die at once")
            raise Crash("all")

    def _host_law(self) -> None:
        """A host that counts has no attempt that another one has replaced."""
        hosts = self.scheduler.table.hosts if self.scheduler is not None else {}
        for worker in self.workers.values() if hosts else ():
            process = worker.process
            is_older = process.alive and self.room.is_fenced(process)
            check(
                not is_older or not hosts[process.host].is_alive,
                f"'{process.name}' goes on at '{process.host}'",
            )

    def _ledger_laws(self) -> None:
        counts = self.ledger.counts("trainer")
        check(counts.missing == 0, f"the ledger lost count: {counts}")
        check(
            counts.trained == len(self.trained),
            f"{len(self.trained)} groups were trained, but not by {counts}",
        )

    def _final_laws(self) -> None:
        self._ledger_laws()
        counts, shape = self.ledger.counts("trainer"), self.shape
        check(
            self.newest_committed == shape.steps,
            f"{self.newest_committed} of {shape.steps} steps were made",
        )
        check(
            counts.trained == shape.steps * shape.prompts_per_step, f"not all was trained: {counts}"
        )
        for step in range(1, shape.steps + 1):
            again = trained(self.contents[step - 1], self.folder.rollouts_of().read(step))
            check(
                again == self.contents[step],
                f"the file of step {step} has other rows than were trained",
            )
        left = self.ledger.in_flight("prompts")
        check(not left, f"groups {left} have no outcome at the end")
        if shape.every_steps:
            self.rounds.at_end(self.ledger, self.folder.read_metrics())

    def _fork(self, name: str, settings: Mapping[str, Any]) -> None:
        host = settings["host"]
        self.say(
            name,
            f"starts as attempt {Life(*settings['life']).attempt}{host and f' on host {host}'}",
        )
        if self._swappers is not None:
            self._swappers.start(name, settings)
        key = f"{name}@{host}" if host else name
        known = [each.process.host for each in self.workers.values() if each.name == name]
        before = [each for each in known if each != host]
        if before and self.random.random() < 0.7:
            self._host_trouble.mend_soon(self.random.choice(before))
        if key not in self.workers:
            self.workers[key] = SimulatedWorker(self, name)
        self.workers[key].start(settings)

    def _kill(self, name: str, host: str) -> None:
        self.say(name, "is killed by the scheduler")
        self._end(name, host)

    def _end(self, name: str, host: str) -> None:
        key = f"{name}@{host}" if host else name
        if key in self.workers:
            self.workers[key].process.die()

    def strike_host(self, process: Process) -> None:
        """A process is in the midst of what its host may be cut off from."""
        if self.shape.hosts and self.random.random() < 0.15:
            self._host_trouble.cut_off(process)

    @property
    def hosts(self) -> Hosts:
        """Those of a world that has some."""
        assert isinstance(self.room.forks, Hosts)
        return self.room.forks

    @property
    def _agents(self) -> Hosts | None:
        return self.room.forks if isinstance(self.room.forks, Hosts) else None

    def _host_of(self, name: str) -> str:
        assert self.scheduler is not None
        return self.scheduler.table.workers[name].host

    def _told(self, message: ToWorker) -> None:
        """The scheduler sends something to a worker."""
        step = message.message.get("evaluate") if isinstance(message, NodeCommand) else None
        if step is not None and self.rounds.ask(step):
            self.say("scheduler", f"asks for the round of step {step}")
            if self.random.random() < 0.4:
                self.nemesis.strike_soon(
                    0.2, lambda: self._of("questions", "eval", "reward", "generator")
                )
        if self.shape.succeeds and self.random.random() < 0.02:
            self._deaths.strike_soon(0.1)

    def _request(self, request: Scale) -> None:
        """Somebody asks for replicas."""
        if not self.begun or self.scheduler is None or self.scheduler.table.run.over:
            return
        assert self._guests is not None
        self.say("somebody", f"wishes for {dict(request.wishes)}")
        self._guests.wished |= request.wishes
        if self.shape.succeeds:
            self.room.asked.append(request)
        self.server.ask(request)
        if self.random.random() < 0.6:
            self.nemesis.strike_soon(0.3, self._on_the_way)
        if self.shape.succeeds and self.random.random() < 0.5:
            self._deaths.strike_soon(0.3)

    def trouble_soon(self, *nodes: str) -> None:
        """Something has begun with these nodes."""
        if self.random.random() < 0.6:
            self.nemesis.strike_soon(1.0, lambda: self._of(*nodes))
        if self.shape.succeeds and self.random.random() < 0.5:
            self._deaths.strike_soon(1.0)

    def who_waits(self) -> str:
        """Every worker, what its nodes say, what it is owed and what it holds."""
        return "\n  ".join(["", *(worker.waits() for worker in self.workers.values())])
