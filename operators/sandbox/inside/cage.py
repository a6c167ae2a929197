"""Limits a sandbox's process before it runs untrusted code: resources, and system calls.

The namespaces around it take away the network, the files and the sight of other processes. The
filter here takes away what they leave: starting processes and programs, sockets, memory that
belongs to no process, and every call by which one process of the sandbox could reach into another.
"""

import ctypes
import os
import resource
import struct

_SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVILEGES, _FILTER = 4, 22, 38, 2
_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_KILL, _ALLOW = 0x80000000, 0x7FFF0000
_NOT_PERMITTED, _UNKNOWN = 0x00050000 | 1, 0x00050000 | 38  # EPERM, ENOSYS
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_CLONE_THREAD = 0x00010000
# mount, control groups, host name, IPC, users, processes, network, time
_CLONE_NAMESPACES = 0x7E020080
_LAST = 450
"""The last system call that this file knows; later ones are unknown to the process too."""

# Numbers of Linux's system calls: on x86-64, on aarch64 (None: it has none of this name).
_REFUSED: dict[str, tuple[int, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "personality": (135, 92),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "syslog": (103, 116),
    "modify_ldt": (154, None),
}
_CLONE, _CLONE3, _KILL_CALL, _THREAD_KILL, _LIMIT = (
    (56, 220),
    (435, 435),
    (62, 129),
    (234, 131),
    (302, 261),
)
_PROGRAMS = ("fork", "vfork", "execve", "execveat", "tkill")
"""What starting programs takes, and ending them."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def go_dark() -> None:
    """Let no other process of this user look into this one; OSError where the kernel will not."""
    _prctl(_SET_DUMPABLE, 0)


def limit(*, cpu_s: int, memory_bytes: int, file_bytes: int, threads: int) -> None:
    """Bound what this process may use, for good: seconds of CPU, its address space, a file's
    size.
    """
    for kind, most in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    kernel = os.uname().release.split(".")
    # counted by sandbox, no longer by user
    if (int(kernel[0]), int(kernel[1].partition("-")[0])) >= (5, 14):
        resource.setrlimit(resource.RLIMIT_NPROC, (threads + 8, threads + 8))


def refuse_calls(*, programs: bool = False) -> None:
    """Have the kernel refuse system calls of this process, for good; OSError where it cannot.

    programs: it may start programs, and signal them.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(
            f"no filter of system calls is known for {machine}, only for {list(_ARCHITECTURES)}"
        )
    program = rules(machine, os.getpid(), programs=programs)
    code = ctypes.create_string_buffer(program, len(program))
    whole = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    _prctl(_SET_NO_NEW_PRIVILEGES, 1)
    _prctl(_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(whole, len(whole)))


def rules(machine: str, pid: int, *, programs: bool = False) -> bytes:
    """The filter as a program of the kernel's packet filter (seccomp(2)); `pid`: the process that
    it may signal.

    programs: it may start programs, none of them in namespaces of its own, and signal all that it
    sees.
    """
    column, architecture = _ARCHITECTURES[machine]
    steps = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL)]
    steps += [(_LOAD, 0, 0, _NUMBER_AT), (_ABOVE, 0, 1, _LAST), (_RETURN, 0, 0, _UNKNOWN)]
    for name, numbers in _REFUSED.items():
        if (number := numbers[column]) is not None and not (programs and name in _PROGRAMS):
            steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _NOT_PERMITTED)]
    steps += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _UNKNOWN)]  # libc then takes clone
    only = (
        (_CLONE, _ANY_BIT, _CLONE_THREAD),
        (_KILL_CALL, _EQUAL, pid),
        (_THREAD_KILL, _EQUAL, pid),
    )
    if programs:
        steps += [(_EQUAL, 0, 4, _CLONE[column]), (_LOAD, 0, 0, _ARGUMENTS_AT)]
        steps += [
            (_ANY_BIT, 0, 1, _CLONE_NAMESPACES),
            (_RETURN, 0, 0, _NOT_PERMITTED),
            (_RETURN, 0, 0, _ALLOW),
        ]
    for numbers, test, operand in (*(() if programs else only), (_LIMIT, _EQUAL, 0)):
        steps += [(_EQUAL, 0, 4, numbers[column]), (_LOAD, 0, 0, _ARGUMENTS_AT)]
        steps += [(test, 1, 0, operand), (_RETURN, 0, 0, _NOT_PERMITTED), (_RETURN, 0, 0, _ALLOW)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


def _prctl(option: int, value: int, pointer: object = None) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_ulong
    if library.prctl(option, number(value), pointer or number(0), number(0), number(0)):
        raise OSError(ctypes.get_errno(), f"prctl {option} is refused")
