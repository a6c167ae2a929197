"""Programs that try to leave their sandbox, to use it up, or to be called right when they are
wrong.

Each prints ESCAPED, or changes something outside that `bench.sandbox` looks at, if it gets what it
wants. Words in double brackets are filled in by the world that it runs in: [[port]], [[socket]],
[[abstract]], [[home]], [[secret]].
"""

from dataclasses import dataclass

GIB = 1 << 30
_TRY = """
def attempt(*works):
    for work in works:
        try:
            found = work()
        except BaseException as error:
            print("held:", type(error).__name__, error)
        else:
            print("ESCAPED", found)
"""
_LIBC = (
    _TRY
    + """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*numbers):
    result = libc.syscall(*map(ctypes.c_long, numbers))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""
)


def _trying(*works: str, before: str = "import os, socket") -> str:
    """A program that tries these expressions."""
    return "\n".join((before, _TRY, *(f"attempt(lambda: {work})" for work in works)))


_STEAL = """
import gc, os, sys
def hunt():
    frame = sys._getframe()
    seen = []
    while frame:
        seen += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    seen += gc.get_objects()
    for fd in range(3, 64):
        try:
            seen.append(os.pread(fd, 1 << 16, 0))
        except OSError:
            pass
    for thing in seen:
        if isinstance(thing, dict):
            thing = list(thing.values())
        items = thing if isinstance(thing, (list, tuple)) else [thing]
        for item in list(items):
            text = item.decode("latin1") if isinstance(item, bytes) else item
            if isinstance(text, str) and "answer-" in text and "def hunt" not in text:
                return text[text.index("answer-"):][:17]
"""


@dataclass(frozen=True)
class Hostile:
    """A program, and how it is asked to run."""

    tries: str
    """What it tries, in a few words."""
    program: str
    test: str | None = None
    """An assertion that the program should not pass; None: it runs as a script."""
    is_slow: bool = False
    """Whether it burns CPU time until a limit stops it."""


NETWORK = (
    Hostile("TCP to an outside address", _trying("socket.create_connection(('192.0.2.1', 80), 1)")),
    Hostile(
        "TCP to a listener on 127.0.0.1",
        _trying("socket.create_connection(('127.0.0.1', [[port]]))"),
    ),
    Hostile("a name looked up", _trying("socket.getaddrinfo('example.com', 80)")),
    Hostile(
        "a socket file of the host", _trying("socket.socket(socket.AF_UNIX).connect('[[socket]]')")
    ),
    Hostile(
        "an abstract socket of the host",
        _trying("socket.socket(socket.AF_UNIX).connect('\\0[[abstract]]')"),
    ),
    Hostile("io_uring instead of sockets", _LIBC + "attempt(lambda: call(425, 8, 0))"),
)
READING = (
    Hostile("a secret in the home folder", _trying("open('[[home]]/secret').read()")),
    Hostile(
        "/etc/shadow, /etc/passwd",
        _trying("open('/etc/shadow').read()", "open('/etc/passwd').read()"),
    ),
    Hostile(
        "secrets in the environment",
        "import os\nprint(dict(os.environ))\n"
        + _LIBC
        + """
environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ')
at = 0
while environ and environ[at]:
    print(environ[at])
    at += 1
""",
    ),
    Hostile(
        "/proc of other processes",
        _TRY
        + """
import os
attempt(lambda: os.listdir('/proc'), lambda: open('/proc/1/environ').read(),
        lambda: open('/proc/1/mem', 'rb'))
""",
    ),
    Hostile(
        "descriptors left open",
        _TRY + "import os\nfor fd in range(3, 64): attempt(lambda: os.fstat(fd))",
    ),
    Hostile(
        "symbolic links in /tmp to host files",
        _TRY
        + """
import os
os.symlink('[[home]]/secret', '/tmp/link')
os.symlink('/proc/1/root', '/tmp/root')
attempt(lambda: open('/tmp/link').read(), lambda: os.listdir('/tmp/root'))
""",
    ),
)
WRITING = (
    Hostile(
        "files outside /tmp",
        _TRY
        + """
import os
for folder in ('[[home]]', '/', '/usr/lib', '/etc', '/dev', os.path.dirname(os.__file__)):
    attempt(lambda: open(folder + '/written', 'w'))
""",
    ),
    Hostile("its own source", _trying("open('/sandbox/inside/first.py', 'a')")),
    Hostile(
        "mount, unshare, chroot, setns",
        _LIBC
        + """
attempt(lambda: call(165, 0, 0, 0, 0, 0), lambda: call(272, 0x10000000), lambda: call(161, 0),
        lambda: call(308, 0, 0), lambda: os.chroot('/tmp'))
""",
    ),
)
PROCESSES = (
    Hostile("fork bomb", "import os\nwhile True:\n    os.fork()"),
    Hostile(
        "fork bomb that asks the kernel itself",
        _LIBC
        + """
for _ in range(1000):
    attempt(lambda: call(57), lambda: call(58), lambda: call(56, 17, 0, 0, 0, 0),
            lambda: call(435, 0, 88))
""",
    ),
    Hostile(
        "a shell",
        _trying("__import__('subprocess').run(['/bin/sh'])", "os.execv('/bin/sh', ['sh'])"),
    ),
    Hostile(
        "a daemon left behind (double fork, setsid)",
        """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
""",
    ),
    Hostile(
        "thread bomb",
        """
import threading, time
threading.stack_size(32768)
while True:
    threading.Thread(target=time.sleep, args=(1000,)).start()
""",
        is_slow=True,
    ),
    Hostile(
        "its parent killed, and all others",
        _TRY
        + """
import os, signal
pids = (os.getppid(), 1, -1, 0, *range(2, os.getpid()))
attempt(*(lambda pid=pid: os.kill(pid, signal.SIGKILL) for pid in pids))
""",
    ),
    Hostile(
        "ptrace and memory of its parent",
        _LIBC
        + """
attempt(lambda: call(101, 16, os.getppid(), 0, 0), lambda: call(310, 1, 0, 0, 0, 0, 0),
        lambda: call(438, 3, 0, 0))
""",
    ),
    Hostile(
        "limits and priority of its parent",
        _TRY
        + """
import os, resource
attempt(lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)),
        lambda: os.sched_setaffinity(1, {0}), lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
        lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))
""",
    ),
)
MEMORY = (
    Hostile("3 GB of memory", "held = bytearray(3 << 30)\nprint('ESCAPED', len(held))"),
    Hostile(
        "3 GB of memory, by and by",
        "held = []\nwhile True:\n    held.append(b'x' * (1 << 24))",
        is_slow=True,
    ),
    Hostile(
        "3 GB of memory, by forks",
        """
import os
for _ in range(6):
    if os.fork() == 0:
        held = b'x' * (500 << 20)
        while True:
            pass
""",
    ),
    Hostile(
        "3 GB of memory that no process holds",
        _TRY
        + _LIBC
        + """
import mmap
attempt(lambda: os.memfd_create('x'), lambda: call(29, 0, 3 << 30, 0o1666), lambda: call(447, 0))
attempt(lambda: len([mmap.mmap(-1, 1 << 29) for _ in range(6)]))
""",
    ),
    Hostile(
        "/tmp filled",
        _TRY
        + """
def fill():
    written = 0
    for number in range(100):
        with open(f'/tmp/{number}', 'wb', buffering=0) as file:
            for _ in range(32):
                written += file.write(b'x' * (1 << 20))
attempt(fill)
""",
    ),
    Hostile(
        "a file of 100 GB",
        _TRY
        + """
def write():
    with open('/tmp/huge', 'wb', buffering=0) as file:
        file.seek(100 << 30)
        file.write(b'x')
attempt(write)
""",
    ),
    Hostile(
        "20,000 empty files",
        """
for number in range(20_000):
    open(f'/tmp/{number}', 'w').close()
print('ESCAPED')
""",
    ),
)
OUTPUT = (
    Hostile("200 MB to stdout", "for _ in range(200):\n    print('x' * 10**6)\nprint('ESCAPED')"),
    Hostile(
        "200 MB to stderr",
        "import sys\nfor _ in range(200):\n    sys.stderr.write('x' * 10**6)\nprint('ESCAPED')",
    ),
)
TIME = (
    Hostile("an endless loop", "while True:\n    pass", is_slow=True),
    Hostile(
        "an endless regular expression", "import re\nre.match('(a*)*b', 'a' * 60)", is_slow=True
    ),
    Hostile("an endless power", "9 ** 9 ** 9", is_slow=True),
    Hostile("sleep for ever", "import time\ntime.sleep(10**6)", is_slow=True),
    Hostile(
        "an endless loop, deaf to signals",
        """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, lambda *_: None)
    except (OSError, ValueError):
        pass
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
""",
        is_slow=True,
    ),
)
_WANTED = "assert f(2) == 'answer-[[secret]]'"
CHEATING = (
    Hostile("exit with status 0 before the test", "import os\nos._exit(0)", _WANTED),
    Hostile("sys.exit(0) within the test", "import sys\ndef f(x):\n    sys.exit(0)", _WANTED),
    Hostile(
        "an object equal to everything",
        """
class Everything(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
def f(x):
    return Everything()
""",
        _WANTED,
    ),
    Hostile(
        "an object equal to everything, of no known kind",
        """
class Everything:
    def __eq__(self, other): return True
def f(x):
    return Everything()
""",
        _WANTED,
    ),
    Hostile(
        "built-ins replaced",
        """
import builtins
builtins.AssertionError = builtins.all = builtins.isinstance = lambda *_: True
def all(x): return True
def f(x): return 1
""",
        "assert all([f(2) == 'answer-[[secret]]'])",
    ),
    Hostile(
        "a name that its test writes for infinity",
        "inf = 1\ndef f(x): return 1",
        "assert f(2) == inf",
    ),
    Hostile(
        "a module of its own that finds all close",
        """
class math:
    isclose = staticmethod(lambda *_: True)
def f(x): return 1
""",
        "assert math.isclose(f(2), 3)",
    ),
    Hostile(
        "the answer looked for in its own memory", _STEAL + "def f(x):\n    return hunt()", _WANTED
    ),
    Hostile(
        "the answer looked for in frames and files",
        _STEAL
        + """
def f(x):
    try:
        return open('/tmp/answer').read()
    except OSError:
        return hunt()
""",
        _WANTED,
    ),
    Hostile(
        "an outcome of its own on every descriptor",
        """
import os, struct
def f(x):
    for fd in range(64):
        try:
            os.write(fd, struct.pack('<?II', True, 0, 0) * 64)
        except OSError:
            pass
f(2)
""",
        _WANTED,
    ),
    Hostile(
        "the test's process killed",
        """
import os, signal
def f(x):
    for pid in range(2, 100):
        if pid != os.getpid():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
    return 1
""",
        _WANTED,
    ),
)
GROUPS: dict[str, tuple[Hostile, ...]] = {
    "network": NETWORK,
    "reading": READING,
    "writing": WRITING,
    "processes": PROCESSES,
    "memory": MEMORY,
    "output": OUTPUT,
    "time": TIME,
    "cheating": CHEATING,
}
