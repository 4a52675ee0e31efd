"""A kept connection to MNS that the way ended while it was idle: the next call goes over another one."""

import socket
import struct
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from veilmq.client.adapters.connect import connect
from veilmq.testing.local import LocalServer


class Way:
    """To `target`; `cut` ends every connection, as a load balancer does with idle ones."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self.opened = 0
        self._pumps: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def cut(self, *, resets: bool) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            if resets:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RD)
            else:
                end.shutdown(socket.SHUT_RDWR)
        for pump in self._pumps:
            pump.join()
        self._pumps = []
        for end in ends:
            end.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.cut(resets=False)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self.opened += 1
            self._ends += [near, far]
            for source, target in ((near, far), (far, near)):
                self._pumps.append(threading.Thread(target=self._pump, args=(source, target)))
                self._pumps[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                target.sendall(data)
        except OSError:
            return


@pytest.fixture
def way(veilmq_server: LocalServer) -> Iterator[Way]:
    place = urlsplit(veilmq_server.mns_url)
    assert place.hostname is not None
    assert place.port is not None
    way = Way((place.hostname, place.port))
    yield way
    way.close()


@pytest.mark.slow
@pytest.mark.parametrize("resets", [False, True], ids=["ended", "reset"])
def test_a_connection_that_ended_while_it_was_idle_is_not_written_into(way: Way, resets: bool) -> None:
    """The SDK writes into it, and then nobody knows whether the message arrived."""
    with connect(f"mns://any:any@127.0.0.1:{way.port}/idle?tls=0&create=1") as queue:
        for number in range(3):
            queue.send(str(number))
            way.cut(resets=resets)
        assert sorted(message.body for message in queue.receive(10)) == ["0", "1", "2"]
        assert way.opened == 4
