"""The veil adapter's way to the server when the way is bad: a server of a few lines that does what the test says."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from veilmq.client.adapters import veil as adapter
from veilmq.client.adapters.veil import VeilAccount, VeilQueue, calls
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.keeper.decisions import INTERVAL, MINIMAL_LIFE
from veilmq.model.errors import MessageGone, MessageTooLarge, VeilError
from veilmq.testing.client_contract import for_each

DESCRIBED = (
    b'{"Name":"q","Account":"1","Region":"r","Incarnation":1,"Created":1,"Modified":1,"Visible":1,"Delayed":2,'
    b'"InFlight":3,"VisibilityTimeout":30,"Delay":0,"Retention":60,"Wait":0,"MessageBytesMax":1024}'
)
SENT = b'{"Results":[{"Id":"1"}]}'
DONE = b"{}"
GRANTED = b'{"Messages":[{"Id":"1","Body":"x","Handle":"h","Lease":600,"Sent":1,"Expires":2}]}'
GONE = b'{"Failures":[{"Index":0,"Error":{"Name":"MessageGone","Fields":{"sequence":1,"attempt":1},"Message":""}}]}'


NAMED = b"x-amzn-RequestId: 1\r\n"


def answer(body: bytes, status: bytes = b"200 OK", headers: bytes = b"") -> bytes:
    """As our server writes it."""
    known = NAMED if status == b"200 OK" else b""
    return b"HTTP/1.1 %b\r\n%bContent-Length: %d%b\r\n\r\n%b" % (status, known, len(body), headers, body)


Step = Callable[[socket.socket], None]


def say(*parts: bytes) -> Step:
    """Answer, in these pieces."""

    def step(connection: socket.socket) -> None:
        for part in parts:
            connection.sendall(part)

    return step


def hang_up(connection: socket.socket) -> None:
    """End the connection."""
    connection.shutdown(socket.SHUT_RDWR)


def be_silent(connection: socket.socket) -> None:
    """Say nothing."""


class Script:
    """A server that takes each request with the next step of its script; without one, it describes the queue."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.requests: list[bytes] = []
        """X-Amz-Target and body of each."""
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        data = b""
        while True:
            try:
                part = connection.recv(65536)
            except OSError:
                return
            if not part:
                return
            data += part
            head, found, body = data.partition(b"\r\n\r\n")
            if not found or len(body) < int(head.rpartition(b"Content-Length: ")[2]):
                continue
            data = b""
            target = head.partition(b"x-amz-target: ")[2].partition(b"\r\n")[0]
            self.requests.append(target + b" " + body)
            step = self.steps.pop(0) if self.steps else say(answer(DESCRIBED))
            try:
                step(connection)
            except OSError:
                return

    def hang_up_all(self) -> None:
        """End every connection that is open."""
        for connection in self._open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def wait_for(self, requests: int) -> None:
        """Returns once so many came, as they do in their own time. Fails if there are more."""
        end = time.monotonic() + 10
        while len(self.requests) < requests:
            assert time.monotonic() < end, "it never came"
            time.sleep(0.001)
        assert len(self.requests) == requests

    def close(self) -> None:
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up_all()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for connection in self._open:
            connection.close()


@contextlib.contextmanager
def patient(queue: VeilQueue, seconds: float | None) -> Iterator[None]:
    """Calls of the queue wait for so long; as long as ever with None."""
    before = queue._calls._timeout
    queue._calls._timeout = before if seconds is None else seconds
    yield
    queue._calls._timeout = before


@pytest.fixture
def script() -> Iterator[Script]:
    server = Script()
    yield server
    server.close()


@pytest.fixture
def account(script: Script) -> Iterator[VeilAccount]:
    account = VeilAccount("127.0.0.1", script.port, "k", "s", timeout=5)
    yield account
    account.close()


@pytest.fixture
def queue(script: Script, account: VeilAccount) -> VeilQueue:
    queue = account.queue("q")
    script.requests.clear()
    return queue


def test_one_connection_serves_one_request_after_another(script: Script, queue: VeilQueue) -> None:
    for _ in range(5):
        queue.stats()
    assert (len(script.requests), script.connections) == (5, 1)


def test_an_extension_leaves_time_for_another_one(
    script: Script, queue: VeilQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a connection that swallowed it the keeper lost the lease, for the account's timeout is longer than its
    lead."""
    assert adapter.EXTEND_SECONDS == adapter._EXTEND.seconds_max < INTERVAL + MINIMAL_LIFE
    monkeypatch.setattr(adapter, "_EXTEND", adapter._EXTEND._replace(seconds_max=0.2))
    script.steps = [be_silent]
    with pytest.raises(TransportError, match=r"no answer within 0\.2 s"):
        queue.extend("handle", 30)


def test_a_connection_that_the_server_ended_is_not_used(script: Script, queue: VeilQueue) -> None:
    script.hang_up_all()
    script.steps = [say(answer(SENT))]
    assert queue.send("once").id == "1"
    assert (len(script.requests), script.connections) == (1, 2)


@pytest.mark.parametrize("step", [hang_up, say(b"HTTP/1.1 200 OK\r\nContent-Le"), be_silent])
def test_a_send_whose_answer_is_lost_goes_out_once(script: Script, queue: VeilQueue, step: Step) -> None:
    def cut(connection: socket.socket) -> None:
        step(connection)
        if step is not be_silent:
            hang_up(connection)

    script.steps = [cut]
    with patient(queue, 0.3 if step is be_silent else None), pytest.raises(TransportError) as lost:
        queue.send("once")
    assert lost.value.may_have_happened
    script.wait_for(1)
    script.steps = [say(answer(SENT))]
    assert queue.send("again").id == "1"


def test_a_receive_whose_answer_is_lost_goes_out_once(script: Script, queue: VeilQueue) -> None:
    script.steps = [hang_up]
    with pytest.raises(TransportError) as lost:
        queue.receive()
    assert lost.value.may_have_happened
    assert len(script.requests) == 1


def test_what_may_be_repeated_goes_out_again(script: Script, queue: VeilQueue) -> None:
    script.steps = [hang_up, say(answer(DONE))]
    assert queue.extend("h", 30) == "h"
    assert len(script.requests) == 2
    assert script.requests[0] == script.requests[1]
    assert script.connections == 2


def test_it_goes_out_twice_at_most(script: Script, queue: VeilQueue) -> None:
    script.steps = [hang_up, hang_up]
    with pytest.raises(TransportError) as lost:
        queue.delete("h")
    assert lost.value.may_have_happened
    assert len(script.requests) == 2


def test_what_may_be_repeated_is_not_if_the_server_is_merely_slow(script: Script, queue: VeilQueue) -> None:
    script.steps = [be_silent]
    with patient(queue, 0.3), pytest.raises(TransportError, match="no answer within"):
        queue.delete("h")
    script.wait_for(1)


def test_a_repeated_delete_that_finds_nothing_is_done(script: Script, queue: VeilQueue) -> None:
    script.steps = [hang_up, say(answer(GONE)), hang_up, say(answer(GONE)), say(answer(GONE))]
    queue.delete("h")
    assert queue.delete_batch(["h"]) == [None]
    with pytest.raises(MessageGone):
        queue.delete("h")  # this one went out once
    script.steps = [hang_up, say(answer(GONE))]
    with pytest.raises(MessageGone):
        queue.extend("h", 30)


def test_nobody_is_there(script: Script) -> None:
    with socket.socket() as bound:  # nobody else can have the port, and nobody listens on it
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        account = VeilAccount("127.0.0.1", port)
        with pytest.raises(TransportError) as refused:
            account.names()
    assert not refused.value.may_have_happened
    assert str(port) in str(refused.value)


def test_a_port_with_tls_is_guessed_where_nothing_was_ever_answered(script: Script, queue: VeilQueue) -> None:
    script.steps = [hang_up, hang_up]
    with pytest.raises(TransportError, match="tls=1"):
        queue.stats()
    queue.stats()
    script.steps = [hang_up]
    with pytest.raises(TransportError) as refused:
        queue.send("x")
    assert "the server closed the connection" in refused.value.reason
    assert "tls=1" not in refused.value.reason


def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(TransportError) as refused:
        VeilAccount("no-such-host.invalid", 1, connect_timeout=5).names()
    assert not refused.value.may_have_happened


def chunked(*parts: bytes) -> bytes:
    lines = b"".join(b"%x;x=y\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\n" + NAMED + b"Transfer-Encoding: chunked\r\n\r\n" + lines + b"0\r\nTrailer: 1\r\n\r\n"


ANSWERS = {
    "plain": (answer(DESCRIBED),),
    "byte by byte": tuple(bytes((byte,)) for byte in answer(DESCRIBED)),
    "head, then body": (answer(DESCRIBED)[: -len(DESCRIBED)], DESCRIBED),
    "as a proxy writes it": (
        b"HTTP/1.1 200 OK\r\n%bcontent-length:%d \r\n\r\n%b" % (NAMED.lower(), len(DESCRIBED), DESCRIBED),
    ),
    "without a phrase": (b"HTTP/1.1 200\r\n%bContent-Length: %d\r\n\r\n%b" % (NAMED, len(DESCRIBED), DESCRIBED),),
    "chunks": (chunked(DESCRIBED[:7], DESCRIBED[7:]),),
    "chunks, cut": (chunked(DESCRIBED)[:90], chunked(DESCRIBED)[90:]),
    "a hint before": (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + answer(DESCRIBED),),
    "a hint before, apart": (b"HTTP/1.1 100 Continue\r\n\r\n", answer(DESCRIBED)),
    "the last": (answer(DESCRIBED, headers=b"\r\nConnection: close"),),
}  # fmt: skip


@for_each("parts", ANSWERS.values(), ids=ANSWERS)
def test_answers_are_read_however_they_come(script: Script, queue: VeilQueue, parts: tuple[bytes, ...]) -> None:
    script.steps = [say(*parts)]
    assert queue.stats().in_flight == 3
    assert queue.stats().visible == 1  # and the next one finds its way too


def test_the_last_answer_of_a_connection_is_the_last(script: Script, queue: VeilQueue) -> None:
    script.steps = [say(answer(DESCRIBED, headers=b"\r\nConnection: close"))]
    queue.stats()
    queue.stats()
    assert script.connections == 2


BAD_ANSWERS = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "another HTTP": b"HTTP/2 200\r\n\r\n",
    "no length": b"HTTP/1.1 200 OK\r\n\r\n",
    "a length that is none": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    "a length beyond all": b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n",
    "a chunk that is none": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a head without end": b"HTTP/1.1 200 OK\r\n" + b"x" * 70_000,
    "more than the length": b"HTTP/1.1 200 OK\r\nContent-Length: 300\r\n\r\n" + b"x" * 200 + b"y" * 70_000,
    "no JSON": answer(b"<html>"),
    "JSON of another shape": answer(b'{"Name":5}'),
}


@for_each("data", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_what_is_no_answer_is_a_typed_error(script: Script, queue: VeilQueue, data: bytes) -> None:
    script.steps = [say(data)]
    script.requests.clear()
    with pytest.raises(TransportError) as wrong:
        queue.send("once")
    assert wrong.value.may_have_happened
    assert len(script.requests) == 1
    assert queue.stats().visible == 1


def test_more_or_fewer_results_than_messages_are_no_answer(script: Script, queue: VeilQueue) -> None:
    for body in (b'{"Results":[]}', b'{"Results":[{"Id":"1"},{"Id":"2"}]}'):
        script.steps = [say(answer(body))]
        with pytest.raises(TransportError) as wrong:
            queue.send("x")
        assert wrong.value.may_have_happened


REFUSALS: list[tuple[bytes, Any]] = [
    (
        answer(b'{"__type":"a#InternalFailure","message":"m"}', b"500 X", b"\r\nx-amzn-RequestId: r-1"),
        ServiceError(code="InternalFailure", status=500, request_id="r-1", message="m"),
    ),
    (
        answer(b"<html>busy", b"503 X"),
        ServiceError(code="HTTP 503", status=503, request_id="", message="<html>busy"),
    ),
    (answer(b"", b"413 X"), MessageTooLarge(size_bytes=4, limit_bytes=1_048_576)),
    (
        answer(b'{"__type":"a#B","message":"m"}', b"403 X", b"\r\nx-amzn-query-error: C;Sender"),
        ServiceError(code="C", status=403, request_id="", message="m"),
    ),
]


@for_each("data, error", REFUSALS)
def test_refusals_are_told_as_they_are(script: Script, queue: VeilQueue, data: bytes, error: VeilError) -> None:
    script.steps = [say(data)]
    script.requests.clear()
    with pytest.raises(type(error)) as refused:
        queue.send("body")
    assert refused.value == error
    assert len(script.requests) == 1


def test_an_error_that_this_version_does_not_know(script: Script, queue: VeilQueue) -> None:
    line = b'{"Results":[{"Error":{"Name":"Novel","Fields":{"x":1},"Message":"what"}}]}'
    script.steps = [say(answer(line))]
    with pytest.raises(ServiceError, match="Novel: what"):
        queue.send("x")


def test_a_refusal_that_comes_before_the_body_is_read(script: Script) -> None:
    """A listener that is full answers at once and closes; the client still learns why."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            connection, _ = listener.accept()
            connection.sendall(answer(b'{"__type":"a#ServiceUnavailable","message":"full"}', b"503 X"))
            connection.close()

        thread = threading.Thread(target=refuse)
        thread.start()
        account = VeilAccount("127.0.0.1", listener.getsockname()[1])
        with pytest.raises(ServiceError, match="full"):
            account.queue("x" * 20_000_000)
        account.close()
        thread.join(10)


def test_closing_ends_a_call_under_way(script: Script, account: VeilAccount, queue: VeilQueue) -> None:
    parked = threading.Event()

    def park(connection: socket.socket) -> None:
        parked.set()

    script.steps = [park]
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(queue.receive(wait=20)))
    thread.start()
    assert parked.wait(10)
    account.close()
    thread.join(10)
    assert results == [[]]
    with pytest.raises(TransportError, match="closed") as refused:
        queue.receive()
    assert not refused.value.may_have_happened
    with pytest.raises(TransportError, match="closed"):
        account.names()


def test_closing_a_send_under_way_says_that_it_may_have_happened(script: Script, queue: VeilQueue) -> None:
    parked = threading.Event()
    script.steps = [lambda connection: parked.set()]
    errors: list[TransportError] = []

    def send() -> None:
        with pytest.raises(TransportError) as ended:
            queue.send("x")
        errors.append(ended.value)

    thread = threading.Thread(target=send)
    thread.start()
    assert parked.wait(10)
    queue.close()
    thread.join(10)
    assert errors[0].may_have_happened
    assert "closed" in errors[0].reason


def test_closing_one_queue_leaves_the_others_alone(account: VeilAccount, queue: VeilQueue) -> None:
    other = account.queue("q")
    queue.close()
    queue.close()
    assert other.stats().visible == 1


def test_a_batch_over_a_way_that_breaks(script: Script, queue: VeilQueue) -> None:
    """The first request's results stand, the second's are in doubt, and the third was not tried."""
    many = b'{"Results":[%b]}' % b",".join([b'{"Id":"1"}'] * 256)
    script.steps = [say(answer(many)), hang_up]
    results = queue.send_batch(["x"] * 600)
    assert all(type(result).__name__ == "Sent" for result in results[:256])
    doubts = [result.may_have_happened for result in results[256:] if isinstance(result, TransportError)]
    assert doubts == [True] * 256 + [False] * 88
    assert len(script.requests) == 2


def test_a_batch_whose_first_answer_is_lost_says_what_may_have_happened(script: Script, queue: VeilQueue) -> None:
    script.steps = [hang_up]
    results = queue.send_batch(["x"] * 300)
    doubts = [result.may_have_happened for result in results if isinstance(result, TransportError)]
    assert doubts == [True] * 256 + [False] * 44


def test_a_batch_of_which_nothing_happened_raises(script: Script, queue: VeilQueue) -> None:
    script.steps = [say(answer(b'{"__type":"a#AccessDenied","message":"no"}', b"403 X"))]
    with pytest.raises(ServiceError, match="AccessDenied"):
        queue.send_batch(["x"] * 300)
    assert len(script.requests) == 1


class Standing:
    """A clock that shows 1,000 seconds."""

    def monotonic(self) -> float:
        return 1_000.0

    def wall(self) -> float:
        return 1_800_000_000.0


def test_the_lease_counts_from_the_grant_and_not_from_the_call(script: Script) -> None:
    account = VeilAccount("127.0.0.1", script.port, clock=Standing())
    queue = account.queue("q")
    message = b'{"Id":"1","Body":"b","Sent":1,"Expires":2,"Handle":"h"%b}'
    for told, waited, lease_end in (
        (b',"Lease":30', b"7.5", 1_037.5),
        (b"", b"7.5", 1_012.5),
        (b',"Lease":30', b"0", 1_030),
    ):
        script.steps = [say(answer(b'{"Messages":[%b],"Waited":%b}' % (message % told, waited)))]
        (received,) = queue.receive(lease=5, wait=20)
        assert received.lease_end == lease_end
    account.close()


def test_a_server_that_trickles_is_given_up(script: Script, queue: VeilQueue) -> None:
    stop = threading.Event()

    def trickle(connection: socket.socket) -> None:
        for byte in b"HTTP/1.1 200 OK\r\n" + b"x" * 1000:
            connection.sendall(bytes((byte,)))
            if stop.wait(0.02):
                return

    script.steps = [trickle]
    with patient(queue, 0.5), pytest.raises(TransportError) as late:
        queue.stats()
    stop.set()
    assert "within 0.5 s" in late.value.reason
    script.wait_for(1)


def until_granting(queue: VeilQueue) -> None:
    """Returns once a receive is under way."""
    end = time.monotonic() + 10
    while not queue._calls._granting:
        assert time.monotonic() < end, "it never began"
        time.sleep(0.001)


@pytest.mark.parametrize("wait", [0, 20])
@pytest.mark.parametrize("whole", [True, False], ids=["account", "queue"])
def test_what_a_closed_receive_still_brings_is_given_back(
    script: Script, account: VeilAccount, queue: VeilQueue, wait: float, whole: bool
) -> None:
    closed = threading.Event()

    def late(connection: socket.socket) -> None:
        assert closed.wait(10)
        connection.sendall(answer(GRANTED))

    script.steps = [late, say(answer(DONE))]
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(queue.receive, lease=600, wait=wait)
        script.wait_for(1)
        until_granting(queue)
        (account if whole else queue).close()
        closed.set()
        assert received.result(10) == []
    assert len(script.requests) == 2
    assert script.requests[1] == b'VeilMQ.Extend {"Queue":"q","Entries":[{"Handle":"h","Lease":0}]}'


def test_a_closed_receive_waits_for_a_while_alone(
    script: Script, queue: VeilQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "LATE_SECONDS", 0.05)
    script.steps = [be_silent]
    with ThreadPoolExecutor(1) as pool, patient(queue, 60):
        received = pool.submit(queue.receive, lease=600)
        script.wait_for(1)
        queue.close()
        assert received.result(10) == []
    assert len(script.requests) == 1


def test_a_closed_call_that_brings_no_lease_ends_at_once(script: Script, queue: VeilQueue) -> None:
    script.steps = [be_silent]
    with ThreadPoolExecutor(1) as pool, patient(queue, 60):
        told = pool.submit(queue.send, "x")
        script.wait_for(1)
        queue.close()
        with pytest.raises(TransportError, match="q is closed") as ended:
            told.result(20)  # and not the minute that a call may take
    assert ended.value.may_have_happened


def test_what_this_process_lacks_is_no_fault_of_the_server() -> None:
    program = (
        "import resource, veilmq\n"
        "from veilmq.client.errors import TransportError\n"
        "connect = lambda: veilmq.connect('veil://127.0.0.1:1/q').send('x')\n"
        "try: connect()\n"
        "except TransportError: pass\n"  # what it imports late is there now
        "resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "connect()\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "this process can open no connection: [Errno 24] Too many open files" in run.stderr
