"""A cable between two ends of a tcp connection, which swallows what it is given while it is cut."""

import contextlib
import socket
import threading


class Cable:
    """Between whoever connects to it and a server."""

    def __init__(self, server: str) -> None:
        host, _, port = server.removeprefix("tcp://").rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_cut = False
        """Whether it swallows everything."""
        self._lock, self._is_over = threading.Lock(), False
        self._near: list[socket.socket] = []
        self._far: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with self._lock:
                    if self._is_over:  # nobody would close what comes now
                        near.close()
                        return
                    self._near.append(near)
                    far = socket.create_connection(self._server)
                    self._far.append(far)
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self.is_cut:
                    sink.sendall(data)

    def replace(self) -> None:
        """Who connected finds the connection closed; the server does not, as after a cut."""
        self.is_cut = False
        for each in self._near:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._is_over = True
        for each in (self._listener, *self._near, *self._far):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
