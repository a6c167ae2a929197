"""A device that records what is asked of it, on a clock of its own: streams that work at given
rates, hosts that wait, and messages between them. The bytes are real, and lie in main memory.

What the clock charges: every call to the device a launch, and its bytes at the rate of copies, in
the stream that is the thread's; a message its bytes at the rate of the link, once both ends have
come to it in their streams; a look whether the device has come to a mark the time until it has. A
program's own stream is never idle: whatever a transfer puts there stands behind what it computes.
"""

import contextlib
import itertools
import threading
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch.overrides import TorchFunctionMode

from transport.errors import WaitTimeout
from transport.native import Copier, Summer
from transport.weights.executors.device import TransferDevice

PROGRAM = "program"
READS = {
    "cpu",
    "item",
    "tolist",
    "numpy",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
}
"""Of a tensor, that wait for its device."""
FREE = {
    *(
        "__get__",
        "__len__",
        "as_strided",
        "as_subclass",
        "data_ptr",
        "detach",
        "dim",
        "element_size",
    ),
    *("expand", "is_conj", "is_contiguous", "is_floating_point", "is_neg", "narrow", "numel"),
    *("permute", "reshape", "select", "set_", "size", "storage_offset", "stride", "unbind"),
    *(
        "_set_grad_enabled",
        "untyped_storage",
        "view",
        "empty",
        "from_numpy",
        "unsqueeze",
        "squeeze",
        "flatten",
    ),
}
"""What no device is asked for."""
_numbers = itertools.count()


class Fetched(torch.Tensor):
    """In main memory: reading it waits for nothing."""


@dataclass(frozen=True)
class Event:
    """Something that a thread has asked of a device, or waited for."""

    rank: str
    stream: str
    what: str
    nbytes: int = 0


@dataclass
class Gpu:
    """One device and its host."""

    rank: str
    copy_bytes_per_s: float
    backlog_s: float = 0.0
    """What the program has always asked for ahead of the device."""
    busy_until_s: float = 0.0
    """When a long computation of the program ends."""
    launch_s: float = 10e-6
    tails: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """When each stream is done."""
    hosts: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """How late it is for each thread."""
    events: list[Event] = field(default_factory=list)
    here: set[int] = field(default_factory=set)
    """Where messages of hosts lie."""

    def begin(self, busy_until_s: float = 0.0) -> None:
        """Another version: everybody's clock stands at 0."""
        self.tails.clear()
        self.hosts.clear()
        self.events.clear()
        self.busy_until_s = busy_until_s

    @property
    def now(self) -> float:
        return self.hosts[threading.get_ident()]

    @now.setter
    def now(self, value: float) -> None:
        self.hosts[threading.get_ident()] = value

    @property
    def seconds(self) -> float:
        """Until its last thread was done."""
        return max(self.hosts.values(), default=0.0)

    def asked(self, what: str, nbytes: int) -> None:
        """A kernel in the thread's stream."""
        self.now += self.launch_s
        self.passes(self.come(nbytes / self.copy_bytes_per_s))
        self.events.append(Event(self.rank, stream(), what, nbytes))

    def come(self, seconds: float = 0.0) -> float:
        """When the thread's stream will be through with all that it was asked for, and this."""
        begin = max(self.now, self.tails[stream()])
        if stream() == PROGRAM:
            begin = max(begin, self.now + self.backlog_s, self.busy_until_s)
        return begin + seconds

    def passes(self, mark: float) -> None:
        """The thread's stream goes on at that time."""
        self.tails[stream()] = max(self.tails[stream()], mark)

    def waits(self, mark: float, what: str) -> None:
        """The thread waits."""
        self.events.append(Event(self.rank, "host", what))
        self.now = max(self.now, mark)


_thread = threading.local()


def stream() -> str:
    """Of this thread."""
    return getattr(_thread, "stream", PROGRAM)


class _Watching(TorchFunctionMode):
    """Sees what the thread asks of torch."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        one = args[0] if args and isinstance(args[0], torch.Tensor) else None
        here = isinstance(one, Fetched) or (one is not None and one.data_ptr() in self.gpu.here)
        if name in READS and not here:
            self.gpu.waits(self.gpu.come(), name)
        made = function(*args, **(kwargs or {}))
        if name not in FREE | READS and not here and not _is_view(made, one):
            self.gpu.asked(name, made.nbytes if isinstance(made, torch.Tensor) else 0)
        return made


def _is_view(made, one) -> bool:
    if not isinstance(made, torch.Tensor):
        return made is not None and not isinstance(made, list | tuple)
    return one is not None and one is not made and made.data_ptr() in _range(one)


def _range(tensor) -> range:
    storage = tensor.untyped_storage()
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes() + 1)


class RecordingDevice(TransferDevice):
    """One queue of a `Gpu` for transfers."""

    is_behind = True

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu, self.stream = gpu, f"transfers {next(_numbers)}"

    def another(self) -> "RecordingDevice":
        return RecordingDevice(self.gpu)

    @contextlib.contextmanager
    def on(self, name: str):
        """This thread asks in that stream."""
        before = getattr(_thread, "stream", None), getattr(_thread, "gpu", None)
        _thread.stream, _thread.gpu = name, self.gpu
        try:
            with _Watching(self.gpu):
                yield
        finally:
            _thread.stream, _thread.gpu = before
            if before[0] is None:
                del _thread.stream, _thread.gpu

    def program(self):
        """This thread is the program's own."""
        return self.on(PROGRAM)

    def beside(self):
        return self.on(self.stream)

    def mark(self) -> float:
        return self.gpu.come()

    def after(self, mark: float | None) -> None:
        if mark is not None:
            self.gpu.passes(mark)
            self.gpu.events.append(Event(self.gpu.rank, stream(), "after"))

    def reached(self, mark: float | None) -> bool:
        if mark is not None:
            self.gpu.waits(mark, "reached")
        return True

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        self.gpu.asked("fetch", tensor.nbytes)
        return tensor.as_subclass(Fetched)

    def copier(self, destinations, sources=None):
        work = Copier(destinations, sources)
        return _Recorded(self.gpu, "copy", work, 2 * _nbytes(destinations))

    def summer(self, tensors):
        return _Recorded(self.gpu, "sum", Summer(tensors), _nbytes(tensors))


def _nbytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class _Recorded:
    """Copies or sums; they run at once, and count as one kernel."""

    def __init__(self, gpu: Gpu, what: str, work, nbytes: int) -> None:
        """`nbytes`: read and written."""
        self.gpu, self.what, self.work, self.nbytes = gpu, what, work, nbytes

    def start(self, *arguments, **named):
        self.gpu.asked(self.what, self.nbytes)
        with torch._C.DisableTorchFunction():
            return self.work.start(*arguments, **named)


@dataclass(eq=False)
class _Post:
    """One end of a message."""

    tensor: torch.Tensor
    at: float
    """When its stream has come to it."""
    done: threading.Event
    over: float = 0.0


class VirtualLink:
    """Makes process groups: messages within this process, in the order of each pair, as NCCL's are,
    on the clock of a link. Those of a one-sided backend are of the hosts.
    """

    message_s = 10e-6

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.groups: list[VirtualGroup] = []
        self.lock = threading.Lock()
        self.posts: dict = defaultdict(list)
        self.free: dict = defaultdict(float)

    def __call__(self, backend, meeting, rank, size, *, connect_s, clock) -> "VirtualGroup":
        """In place of `ProcessGroup`."""
        self.groups.append(VirtualGroup(self, backend, meeting, rank, size))
        return self.groups[-1]


class VirtualGroup:
    """One rank's end."""

    def __init__(self, link, backend, meeting, rank, size) -> None:
        self.link, self.rank, self.size, self.backend = link, rank, size, backend
        self._of_hosts = backend in ("shared_memory", "cuda_ipc")
        self._key, self._over = meeting.store, meeting.over

    def meet(self, device, deadline, clock):
        """All are in one process."""

    def send(self, tensor, peer, tag):
        return self._post((self._key, self.rank, peer), tensor, 0)

    def receive(self, tensor, peer, tag):
        return self._post((self._key, peer, self.rank), tensor, 1)

    def wait(self, work, deadline, clock, *, is_watched):
        """The host waits for it."""
        self._match(work, deadline, clock)
        gpu = _thread.gpu
        gpu.now = max(gpu.now, work.over)
        if not self._of_hosts:
            gpu.waits(work.over, "message")

    def order(self, work, deadline, clock):
        """The thread's stream waits for it; of hosts, the thread."""
        if self._of_hosts:
            self.wait(work, deadline, clock, is_watched=True)
        else:
            self._match(work, deadline, clock)
            _thread.gpu.passes(work.over)

    def abort(self):
        self._over.set()

    def _match(self, work, deadline, clock):
        while not work.done.wait(0.01):
            if self._over.is_set() or clock() > deadline:
                raise WaitTimeout("a message has not come; found its deadline passed")

    def _post(self, pair, tensor, side):
        gpu, link = _thread.gpu, self.link
        gpu.now += gpu.launch_s
        if self._of_hosts:
            gpu.here.add(tensor.data_ptr())
        with torch._C.DisableTorchFunction(), link.lock:
            post = _Post(tensor, gpu.now if self._of_hosts else gpu.come(), threading.Event())
            waiting = link.posts[pair]
            if not waiting or waiting[0][1] == side:
                if side == 0:
                    post.tensor = tensor.detach().clone()
                waiting.append((post, side))
                return post
            other, _ = waiting.pop(0)
            sent, received = (other, post) if side else (post, other)
            received.tensor.copy_(sent.tensor)
            begin = sent.at
            if not self._of_hosts:
                ends = (*pair[:2], "out"), (pair[0], pair[2], "in")
                begin = max(begin, received.at, *(link.free[end] for end in ends))
            over = begin + link.message_s + sent.tensor.nbytes / link.bytes_per_s
            if not self._of_hosts:
                link.free.update(dict.fromkeys(ends, over))
            for one in (sent, received):
                one.over = over
                one.done.set()
        return post
