"""Who joins and who leaves while a run goes on, whom to tell, in which order: a state machine without sockets.

A join: a process is forked and says hello with its addresses; everybody downstream confirms that it expects one sender
more; the newcomer is wired; once it is ready it is started, and everybody upstream is told to send to it too.
A leave: everybody upstream lets go of the youngest replica, whose input so ends. It finishes what it has, ends its
outlets, and is stopped when all it sent is acknowledged and upstream knows the same of what it got.

One join at a time, and no leave begins during one: so a newcomer's neighbours are the same from its fork to its start.

A member that died is started again in the state it was in. Its senders send again what it did not acknowledge, a leaver
leaves once it has that; and while somebody is away, no join and no leave begins.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from dataflow.errors import GraphError, nearest
from dataflow.graph import Graph
from dataflow.planning.plan import Plan, check_replicas
from dataflow.planning.wiring import edges
from dataflow.scheduler.members import Member


@dataclass(frozen=True, kw_only=True)
class Fork:
    """Start a process for one replica more."""

    name: str
    node: str
    replica: int
    """Its number, never used before in this run."""
    senders: Mapping[str, int]
    """By edge that ends there: how many senders to expect."""
    gpus: tuple[int, ...]
    """Its accelerators; empty: CPU."""


@dataclass(frozen=True)
class Say:
    """Send a word to a worker; one that carries a `ticket` is to be confirmed."""

    to: str
    word: Mapping[str, Any]


@dataclass(frozen=True)
class Tell:
    """Say something to the user."""

    text: str


Order: TypeAlias = Fork | Say | Tell


class Scaling:
    """The replicas of every node, as they are and as they are wished.

    consumes: wishes (`scale`), what workers say (`hello`, `confirmed`, `ready`, `drained`), their ends (`exited`),
        deaths (`fell`) and returns (`hello`, `ready`)
    produces: orders: processes to fork, words to send
    waits for: a newcomer, and the confirmations of its neighbours; a leaver's last rows; those that are away
    unblocked by: what they say
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        """The members that the plan starts."""
        self._graph, self._plan = graph, plan
        worker = {node: placement.worker for node, placement in plan.placements.items()}
        self._edges = [
            (edge.name, worker[edge.producer], worker[edge.consumer])
            for edge in edges(graph) if worker[edge.producer] != worker[edge.consumer]
        ]  # fmt: skip
        self._members = {
            f"{name}-{replica}": Member(
                f"{name}-{replica}", name, replica, gpus=plan.placements[nodes[0]].gpus_of(replica)
            )
            for name, replica, nodes in plan.processes()
        }
        for member in self._members.values():
            member.senders = {other.name for other in self._members.values() if other.worker in self._upstream(member)}
        self._wishes: dict[str, int] = {}
        self._last_ticket = 0
        self._begun = False
        self._away: set[str] = set()
        """Members that died and are not ready again."""

    def to_plain(self) -> dict[str, Any]:
        """All that it knows, for a successor; `take_up` gives it back."""
        members = [member.to_plain() for member in self._members.values()]
        return {
            "members": members,
            "wishes": self._wishes,
            "last_ticket": self._last_ticket,
            "away": sorted(self._away),
        }

    def take_up(self, plain: Mapping[str, Any]) -> list[Order]:
        """Be where the scheduler was that wrote this; the words again that may have been lost: twice does no harm."""
        self._members = {member.name: member for member in map(Member.from_plain, plain["members"])}
        self._wishes, self._last_ticket = dict(plain["wishes"]), plain["last_ticket"]
        self._away, self._begun = set(plain["away"]), True
        orders: list[Order] = []
        for member in self._members.values():
            for ticket, who in member.unconfirmed.items():
                if member.state == "joining":
                    orders.append(self._expect(member, self._members[who], ticket))
                else:
                    orders.append(self._about(who, member, "retire", ticket=ticket))
            if member.state == "live":
                orders += [self._about(sender, member, "add") for sender in sorted(member.senders)]
            if member.state == "leaving":
                member.wired_again = True
                told = sorted(member.senders - set(member.unconfirmed.values()))
                orders += [self._over(member, sender) for sender in told]
            if member.state == "stopping":
                orders.append(Say(member.name, {"kind": "stop"}))
        return orders

    @property
    def joining(self) -> str | None:
        """The newcomer on its way."""
        return next((m.name for m in self._members.values() if m.state == "joining"), None)

    def replicas(self, node: str) -> dict[str, int]:
        """How many replicas of a node are joining, live, leaving."""
        states = [m.state for m in self._members.values() if m.worker == self._plan.placements[node].worker]
        return {
            "joining": states.count("joining"), "live": states.count("live"),
            "leaving": states.count("leaving") + states.count("stopping"),
        }  # fmt: skip

    def state(self, name: str) -> str:
        """joining | live | leaving | stopping | left."""
        return self._members[name].state

    def leaves(self, name: str) -> bool:
        """Whether a worker was told to stop, so that its end is in order."""
        return self._members[name].state in ("stopping", "left")

    def begin(self, addresses: Mapping[str, Mapping[str, str]]) -> list[Order]:
        """The run has started; where each worker receives, by worker and edge."""
        self._begun = True
        for name, own in addresses.items():
            self._members[name].addresses = own
        return self._advance()

    def scale(self, wishes: Mapping[str, int]) -> list[Order]:
        """Wish for so many replicas of some nodes. Raises GraphError, and wishes nothing, when one cannot have them."""
        self.check(wishes)
        self._wishes |= wishes
        return self._advance()

    def check(self, wishes: Mapping[str, int]) -> None:
        """Raise GraphError for an unknown node, and for a number of replicas that a node cannot have."""
        for node, count in wishes.items():
            if node not in self._graph.operators:
                raise GraphError(
                    f"replicas are asked for '{node}', but the graph has {list(self._graph.operators)}"
                    f"{nearest(node, self._graph.operators)}; name one of these"
                )
            check_replicas(self._graph.operators[node], count)
            most = self._most(node)
            if most is not None and count > most:
                raise GraphError(
                    f"'{node}' is to have {count} replicas of {self._plan.placements[node].share} each, but "
                    f"{self._plan.devices.gpus} GPUs have room for {most} beside the others; ask for {most} at most"
                )

    def fell(self, name: str) -> list[Order]:
        """A member died that was not told to stop, and is going to be started again."""
        member = self._members[name]
        self._away.add(name)
        member.drained = member.wired = member.wired_again = False
        member.senders = {sender for sender in member.senders if self._members[sender].state != "left"}
        for other in self._members.values():
            if other.state == "joining" and other is not member:
                # The next attempt is started with the right number of senders.
                other.unconfirmed = {ticket: who for ticket, who in other.unconfirmed.items() if who != name}
        if member.state == "joining":
            member.addresses = None
        return self._wire()

    def senders(self, name: str) -> dict[str, int]:
        """By edge that ends at a member which died: how many senders its next attempt is to expect."""
        member = self._members[name]
        return {
            edge: sum(self._members[sender].worker == producer for sender in member.senders)
            for edge, producer, consumer in self._edges if consumer == member.worker
        }  # fmt: skip

    def hello(self, name: str, addresses: Mapping[str, str]) -> list[Order]:
        """A newcomer, or one that died, tells where it receives."""
        member = self._members[name]
        member.addresses = addresses
        return self._wire() if member.state == "joining" else self._wire_again(member)

    def confirmed(self, ticket: int) -> list[Order]:
        """A worker has done what the word with this ticket said."""
        orders: list[Order] = []
        for member in self._members.values():
            sender = member.unconfirmed.pop(ticket, None)
            if sender is not None and member.state == "leaving" and member.wired_again:
                orders.append(self._over(member, sender))
        return orders + self._wire() + self._stop()

    def ready(self, name: str) -> list[Order]:
        """One is built and wired: it starts, and a newcomer gets its share of the rows from now on."""
        member = self._members[name]
        self._away.discard(name)
        orders: list[Order] = [Say(name, {"kind": "start"})]
        if member.state != "joining":
            return orders + self._advance()
        member.state = "live"
        orders += [self._about(sender, member, "add") for sender in sorted(member.senders)]
        orders.append(Tell(f"'{name}' has joined with {self._plan.placements[member.worker].share}"))
        return orders + self._advance()

    def drained(self, name: str) -> list[Order]:
        """A worker's loops have ended, and all they sent is acknowledged."""
        self._members[name].drained = True
        return self._stop()

    def exited(self, name: str) -> list[Order]:
        """A worker that was told to stop has ended, however it did."""
        self._members[name].state = "left"
        for member in self._members.values():
            member.unconfirmed = {ticket: who for ticket, who in member.unconfirmed.items() if who != name}
        return [Tell(f"'{name}' has left; all it had was sent on"), *self._stop(), *self._advance()]

    def missing(self) -> str:
        """What the newcomer on its way waits for, for people."""
        member = self._members[self.joining or ""]
        if member.addresses is None:
            return "its process to say hello"
        waited = sorted(set(member.unconfirmed.values()))
        return f"{', '.join(waited)} to expect it" if waited else "its operator to be built"

    # Decisions

    def _advance(self) -> list[Order]:
        """Begin what is wished and may begin now."""
        orders: list[Order] = []
        for node, count in list(self._wishes.items()):
            if self.joining is not None or self._away or not self._begun:
                break
            live = [m for m in self._members.values() if m.worker == node and m.state == "live"]
            for member in sorted(live, key=lambda m: m.replica)[count:]:
                orders += self._leave(member)
            gpus = self._gpus(node)
            if len(live) >= count:
                del self._wishes[node]
            elif gpus is not None:
                orders += self._join(node, gpus)
        return orders

    def _join(self, node: str, gpus: tuple[int, ...]) -> list[Order]:
        replica = 1 + max(m.replica for m in self._members.values() if m.worker == node)
        member = Member(f"{node}-{replica}", node, replica, state="joining", gpus=gpus)
        live = [m for m in self._members.values() if m.state == "live"]
        member.senders = {m.name for m in live if m.worker in self._upstream(member)}
        self._members[member.name] = member
        senders = {
            edge: sum(m.worker == producer for m in live)
            for edge, producer, consumer in self._edges if consumer == node
        }  # fmt: skip
        orders: list[Order] = [Fork(name=member.name, node=node, replica=replica, senders=senders, gpus=gpus)]
        for receiver in live:
            if any((producer, consumer) == (node, receiver.worker) for _, producer, consumer in self._edges):
                receiver.senders.add(member.name)
                orders.append(self._expect(member, receiver, self._ticket(member, receiver.name)))
        return orders

    def _wire(self) -> list[Order]:
        """Wire the newcomer, once, when it has said hello and is expected."""
        name = self.joining
        if name is None or self._members[name].wired:
            return []
        if self._members[name].unconfirmed or self._members[name].addresses is None:
            return []
        self._members[name].wired = True
        addresses: dict[str, list[str]] = {}
        for member in self._members.values():
            if name in member.senders:
                for edge, address in self._inlets(member, self._members[name]).items():
                    addresses.setdefault(edge, []).append(address)
        return [Say(name, {"kind": "wire", "addresses": addresses})]

    def _wire_again(self, member: Member) -> list[Order]:
        """Where one that died sends to; of a leaver only one that it had not let go, which it does at once."""
        member.wired = member.wired_again = True
        addresses: dict[str, list[str]] = {}
        orders: list[Order] = []
        for receiver in self._members.values():
            tickets = [ticket for ticket, who in receiver.unconfirmed.items() if who == member.name]
            leaving = receiver.state == "leaving" and bool(tickets)
            if member.name in receiver.senders and (receiver.state == "live" or leaving):
                for edge, address in self._inlets(receiver, member).items():
                    addresses.setdefault(edge, []).append(address)
                if leaving:
                    orders.append(self._about(member.name, receiver, "retire", ticket=tickets[0]))
        if member.state == "leaving":
            told = sorted(member.senders - set(member.unconfirmed.values()))
            orders += [self._over(member, sender) for sender in told]
        for sender in sorted(member.senders):
            if self.leaves(sender):  # it may come once more, or not: so it counts by its name
                orders.append(self._over(member, sender))
        return [Say(member.name, {"kind": "wire", "addresses": addresses}), *orders]

    def _over(self, member: Member, sender: str) -> Say:
        """Tell a leaver that a sender has told it the end, be it the attempt before: it need not wait for that."""
        own = self._members[sender]
        edges = [
            edge for edge, producer, consumer in self._edges if (producer, consumer) == (own.worker, member.worker)
        ]
        return Say(member.name, {"kind": "over", "senders": dict.fromkeys(edges, own.replica)})

    def _leave(self, member: Member) -> list[Order]:
        member.state = "leaving"
        orders: list[Order] = []
        for sender in sorted(member.senders):
            if self._members[sender].state != "left":
                ticket = self._ticket(member, sender)
                orders.append(self._about(sender, member, "retire", ticket=ticket))
        return orders

    def _stop(self) -> list[Order]:
        """Stop the leavers that have nothing left, and of which upstream knows it."""
        orders: list[Order] = []
        for member in self._members.values():
            if member.state == "leaving" and member.drained and not member.unconfirmed:
                member.state = "stopping"
                orders += [
                    self._over(other, member.name) for other in self._members.values()
                    if member.name in other.senders and other.wired_again and other.state != "left"
                ]  # fmt: skip
                orders.append(Say(member.name, {"kind": "stop"}))
        return orders

    def _about(self, sender: str, member: Member, kind: str, **more: Any) -> Say:
        """A word to a sender about one of its receivers."""
        return Say(sender, {"kind": kind, "receivers": self._inlets(member, self._members[sender]), **more})

    def _expect(self, newcomer: Member, receiver: Member, ticket: int) -> Say:
        """Tell a receiver how many senders it has had in all, with a newcomer."""
        ever = sum(self._members[sender].worker == newcomer.worker for sender in receiver.senders)
        ends = (newcomer.worker, receiver.worker)
        own = [edge for edge, producer, consumer in self._edges if (producer, consumer) == ends]
        return Say(receiver.name, {"kind": "expect", "senders": dict.fromkeys(own, ever), "ticket": ticket})

    def _inlets(self, member: Member, sender: Member) -> dict[str, str]:
        """Where a member receives what a sender sends, by edge."""
        assert member.addresses is not None, "whoever is wired has said hello"
        return {
            edge: member.addresses[edge] for edge, producer, consumer in self._edges
            if (producer, consumer) == (sender.worker, member.worker)
        }  # fmt: skip

    def _ticket(self, member: Member, confirms: str) -> int:
        self._last_ticket += 1
        member.unconfirmed[self._last_ticket] = confirms
        return self._last_ticket

    def _upstream(self, member: Member) -> set[str]:
        return {producer for _, producer, consumer in self._edges if consumer == member.worker}

    def _most(self, node: str) -> int | None:
        """Replicas that the accelerators have room for; None: it runs on the CPU."""
        placement = self._plan.placements[node]
        if not placement.gpus:
            return None
        others = {gpu for m in self._members.values() if m.worker != node and m.state != "left" for gpu in m.gpus}
        most, taken = 0, others - set(placement.gpus)
        while (block := spare(self._plan.devices.gpus, taken, placement.ranks)) is not None:
            most, taken = most + 1, taken | set(block)
        return most

    def _gpus(self, node: str) -> tuple[int, ...] | None:
        """Accelerators for one replica more; None: wait until a leaver gives some back."""
        placement = self._plan.placements[node]
        if not placement.gpus:
            return ()
        taken = {gpu for m in self._members.values() if m.state != "left" for gpu in m.gpus}
        return spare(self._plan.devices.gpus, taken, placement.ranks)


def spare(gpus: int, taken: Collection[int], ranks: int) -> tuple[int, ...] | None:
    """The first accelerators in a row of `gpus` that nobody has, as many as one replica takes; None: there are none."""
    for first in range(gpus - ranks + 1):
        block = tuple(range(first, first + ranks))
        if not set(block) & set(taken):
            return block
    return None
