"""Somebody without the keys of a run, who tries every port that its processes listen at; says what
he got to.
"""

import json
import socket
import sys
import time
from pathlib import Path

import psutil
import zmq
from zmq.utils.monitor import parse_monitor_message

DEADLINE_S = 60.0
FOR_EACH_S = 1.5


def ports_of(pid: int) -> set[int]:
    """Where a process and those below it listen, over tcp."""
    found = set()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        found |= {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    return found


def knock(context: "zmq.Context[zmq.Socket[bytes]]", port: int, keyed: bool) -> list[str]:
    """Connect, with keys of my own or with none, and say something; what became of the
    connection.
    """
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.LINGER, 0)
    dealer.set(zmq.IDENTITY, b"trainer-0")
    if keyed:
        dealer.curve_serverkey, _ = zmq.curve_keypair()
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    monitor = dealer.get_monitor_socket(zmq.Event.ALL)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    dealer.send(b"\xde\xad" * 50)
    events, deadline = set(), time.monotonic() + FOR_EACH_S
    while (left := deadline - time.monotonic()) > 0:
        if monitor.poll(int(left * 1000) + 1):
            events.add(zmq.Event(parse_monitor_message(monitor.recv_multipart())["event"]).name)
    events |= {"ANSWERED"} if dealer.poll(0) else set()
    dealer.disable_monitor()
    monitor.close()
    dealer.close()
    return sorted(str(event) for event in events)


def main(pid: int, awaited: int, ready: str, report: str) -> None:
    """Once the file `ready` is there, try the ports of a process, of which `awaited` must come;
    write a report.
    """
    deadline = time.monotonic() + DEADLINE_S
    while not Path(ready).exists() or len(ports_of(pid)) < awaited:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    found = {}
    for port in ports_of(pid):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as junk:
            junk.sendall(b"GET / HTTP/1.1\r\n\r\n" * 200)
        found[port] = [knock(context, port, keyed) for keyed in (False, True)]
    Path(report + ".part").write_text(json.dumps(found))
    Path(report + ".part").rename(report)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
