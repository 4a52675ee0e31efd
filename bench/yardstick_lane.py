"""One process of the yardstick: a whole server, driven in its own process without sockets.

    PYTHONPATH=DIR/src python bench/yardstick_lane.py --tree DIR --data DIR

Strategy: the tree's own command line starts `serve` on its own loop; none of its internals are imported. The loop
exposes the factory of the SQS port's connections, so each of 32 connections gets our own transport: signed requests go
into `data_received` as bytes, and the answer is what is written to the transport. This measures the full cost of a
request (HTTP, signature, codec, engine, store, commit and its sync, answer) without a client or sockets.

Each line on standard input requests one round, and gets one line of JSON: CPU in microseconds per request, by
operation. A round has one or more waves, a wave is one request on each connection; the waves send, receive and delete
in turn, so that the queue stays shallow. `round` measures each wave as a whole: CPU of the process, and retired
instructions where the machine counts them. `stages` splits it: the methods of `STAGES` are wrapped with a stopwatch
from then on. A method that a tree does not have under that name counts for the enclosing stage.
"""

import argparse
import asyncio
import ctypes
import functools
import gc
import hashlib
import hmac
import importlib
import json
import os
import socket
import struct
import sys
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import uvloop

CONNECTIONS = 32
BODY_BYTES = 200
BATCHES = (1, 10)
NAMES = [f"{operation} {batch}" for batch in BATCHES for operation in ("send", "receive", "delete")]
ACCOUNT, KEY, SECRET = "111111111111", "AKIDYARDSTICK000001", "yardstick-secret"
STAGES = {
    "http in": ("Connection.data_received",),
    "decode": ("Codec.decode",),
    "submit": ("Port.proceed", "Shell.submit"),
    "gather": ("Shell._turn",),
    "apply": ("SqliteStore.apply",),
    "commit": ("SqliteStore.commit",),
    "hand back": ("Engine.committed", "Conversation.answer"),
    "encode": ("Codec.encode",),
    "http out": ("Connection.write_answer",),
}
"""By name of the stage: the methods that begin it, `Class.method`, in whichever module of the tree."""
NO_RANDOMIZE = 0x0040000
"""Of personality(2): the same addresses in every process, so that caches and hashes of addresses do not differ."""

Wave = list[bytes]
Numbers = dict[str, dict[str, list[float]]]
"""By operation and batch (`send 10`), then by what is measured: a value a wave, for one request.

Beside the stages stands how many of them the wave `entered`.
"""


class Loop(uvloop.Loop):
    """Hands out the factories of the servers that are opened on it."""

    def __init__(self) -> None:
        super().__init__()
        self.factories: dict[int, Callable[[], asyncio.Protocol]] = {}

    async def create_server(self, factory: Any, *args: Any, **given: Any) -> Any:
        server = await super().create_server(factory, *args, **given)
        for each in server.sockets:
            self.factories[each.getsockname()[1]] = factory
        return server


class Transport(asyncio.Transport):
    """Receives what a connection answers."""

    def __init__(self, number: int, take: Callable[[int, bytes], None]) -> None:
        super().__init__({"peername": ("127.0.0.1", 40_000 + number)})
        self._number = number
        self._take = take

    def write(self, data: Any) -> None:
        self._take(self._number, data)

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


class Connections:
    """The connections, and the answers of the current wave."""

    def __init__(self, factory: Callable[[], asyncio.Protocol]) -> None:
        self._protocols = [factory() for _ in range(CONNECTIONS)]
        self._answers: Wave = [b""] * CONNECTIONS
        self._left = 0
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for number, protocol in enumerate(self._protocols):
            protocol.connection_made(Transport(number, self._take))

    def _take(self, number: int, data: bytes) -> None:
        self._answers[number] = data
        self._left -= 1
        if not self._left:
            self._done.set_result(None)

    async def wave(self, requests: Wave) -> Wave:
        """The answers to one request per connection. Raises AssertionError for an answer other than 200."""
        self._left, self._done = len(requests), asyncio.get_running_loop().create_future()
        for protocol, request in zip(self._protocols, requests, strict=False):
            protocol.data_received(request)
        await self._done
        return self._answers[: len(requests)]


class Requests:
    """Signed requests, no two alike, as in bench/lifecycle.lua."""

    def __init__(self, port: int) -> None:
        self._host = f"127.0.0.1:{port}"
        self._url = f"http://{self._host}/{ACCOUNT}/yardstick"
        self._serial = 0

    def create(self) -> bytes:
        return self._signed("CreateQueue", {"QueueName": "yardstick"})

    def send(self, batch: int) -> bytes:
        self._serial += 1
        body = f"{self._serial:010}".ljust(BODY_BYTES, "x")
        if batch == 1:
            return self._signed("SendMessage", {"QueueUrl": self._url, "MessageBody": body})
        entries = [{"Id": str(place), "MessageBody": body} for place in range(batch)]
        return self._signed("SendMessageBatch", {"QueueUrl": self._url, "Entries": entries})

    def receive(self, batch: int) -> bytes:
        self._serial += 1
        lease = 60 + self._serial % 30_000
        given = {"QueueUrl": self._url, "MaxNumberOfMessages": batch, "VisibilityTimeout": lease}
        return self._signed("ReceiveMessage", given)

    def delete(self, answer: bytes, batch: int) -> bytes:
        """A request that deletes the messages in a receive's answer."""
        messages = json.loads(answer.partition(b"\r\n\r\n")[2])["Messages"]
        assert len(messages) == batch
        handles = [message["ReceiptHandle"] for message in messages]
        if batch == 1:
            return self._signed("DeleteMessage", {"QueueUrl": self._url, "ReceiptHandle": handles[0]})
        entries = [{"Id": str(place), "ReceiptHandle": handle} for place, handle in enumerate(handles)]
        return self._signed("DeleteMessageBatch", {"QueueUrl": self._url, "Entries": entries})

    def _signed(self, operation: str, given: dict[str, Any]) -> bytes:
        """With Signature Version 4 (AWS IAM User Guide)."""
        body = json.dumps(given).encode()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        scope = f"{stamp[:8]}/us-east-1/sqs/aws4_request"
        headers = {
            "content-type": "application/x-amz-json-1.0",
            "host": self._host,
            "x-amz-date": stamp,
            "x-amz-target": f"AmazonSQS.{operation}",
        }
        names = ";".join(headers)
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        canonical = f"POST\n/\n\n{lines}\n{names}\n{hashlib.sha256(body).hexdigest()}"
        to_sign = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        signature = hmac.new(_signing_key(stamp[:8]), to_sign.encode(), "sha256").hexdigest()
        sent = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        credential = f"Credential={KEY}/{scope}, SignedHeaders={names}, Signature={signature}"
        head = (
            f"POST / HTTP/1.1\r\n{sent}User-Agent: Boto3/1.43 md/Botocore\r\n"
            f"Authorization: AWS4-HMAC-SHA256 {credential}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@functools.cache
def _signing_key(day: str) -> bytes:
    key = b"AWS4" + SECRET.encode()
    for part in (day, "us-east-1", "sqs", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


class Instructions:
    """Retired user instructions of the process with its threads (perf_event_open(2)); none where they are not
    counted, as in most virtual machines."""

    _NUMBERS: Final = {"x86_64": 298, "aarch64": 241}
    # type, size, config, ..., flags: inherit | exclude_kernel | exclude_hv; of version 0 of the structure.
    _ATTRIBUTES: Final = struct.pack("IIQQQQQIIQ", 0, 64, 1, 0, 0, 0, 0b110_0010, 0, 0, 0)

    def __init__(self) -> None:
        number = self._NUMBERS.get(os.uname().machine)
        self._file = -1
        if number is not None:
            attributes = ctypes.create_string_buffer(self._ATTRIBUTES, len(self._ATTRIBUTES))
            self._file = ctypes.CDLL(None, use_errno=True).syscall(number, attributes, 0, -1, -1, 8)

    @property
    def counted(self) -> bool:
        return self._file >= 0

    def read(self) -> int:
        return struct.unpack("Q", os.read(self._file, 8))[0] if self.counted else 0


class Stopwatch:
    """CPU by stage: a method that begins a stage stops the clock of the enclosing stage.

    The stopwatch's own cost, measured once, is subtracted where it occurs. A commit in another thread counts with that
    thread's CPU.
    """

    def __init__(self) -> None:
        self.spent_ns: defaultdict[str, int] = defaultdict(int)
        self.apart = 0
        """Commits in another thread."""
        self._under_way = ["rest"]
        self._within_ns = self._around_ns = 0
        self._since = time.thread_time_ns()
        self._own = threading.get_ident()
        self._calibrate()

    def _calibrate(self) -> None:
        nothing = self.wrap("nothing", lambda: None)
        within, around = [], []
        for _ in range(50):
            self.begin()
            for _ in range(100):
                nothing()
            spent = self.end()
            within.append(spent["nothing"] // 100)
            around.append(spent["rest"] // 100)
        self._within_ns, self._around_ns = min(within), min(around)

    def begin(self) -> None:
        """A measured part begins."""
        self.spent_ns.clear()
        self._since = time.thread_time_ns()

    def end(self) -> dict[str, int]:
        """Of all stages since then."""
        self.spent_ns["rest"] += time.thread_time_ns() - self._since
        return dict(self.spent_ns)

    def wrap(self, stage: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, measured as that stage."""
        spent, under_way, clock = self.spent_ns, self._under_way, time.thread_time_ns

        @functools.wraps(method)
        def measured(*args: Any, **given: Any) -> Any:
            if threading.get_ident() != self._own:
                return self._elsewhere(stage, method, *args, **given)
            spent[under_way[-1]] += clock() - self._since
            under_way.append(stage)
            self._since = clock() + self._within_ns
            try:
                return method(*args, **given)
            finally:
                spent[stage] += clock() - self._since
                under_way.pop()
                self._since = clock() + self._around_ns

        return measured

    def _elsewhere(self, stage: str, method: Callable[..., Any], *args: Any, **given: Any) -> Any:
        self.apart += 1
        since = time.thread_time_ns()
        try:
            return method(*args, **given)
        finally:
            self.spent_ns[stage] += time.thread_time_ns() - since

    def wrap_all(self) -> None:
        """The methods of `STAGES`, wherever the tree has them."""
        stages = {method: stage for stage, methods in STAGES.items() for method in methods}
        for each in classes():
            for name in [name for name in vars(each) if f"{each.__name__}.{name}" in stages]:
                setattr(each, name, self.wrap(stages[f"{each.__name__}.{name}"], vars(each)[name]))


def classes() -> set[type]:
    """All that the tree has loaded."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("veilmq.")]
    found = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    return {each for each in found if each.__module__.startswith("veilmq.")}


def commit_on_the_loop() -> None:
    """Keep commits on the loop, so that two lanes do the same work; otherwise they move to a thread if the disk is
    slow."""
    for each in classes():
        module = sys.modules[each.__module__]
        if each.__name__ == "Committer" and hasattr(module, "SHORT_US"):
            module.SHORT_US = 1 << 60


class Lane:
    """Rounds of waves, and what they took."""

    def __init__(self, connections: Connections, requests: Requests, instructions: Instructions) -> None:
        self._connections, self._requests, self._instructions = connections, requests, instructions
        self._stopwatch: Stopwatch | None = None

    async def answer(self, question: str) -> Numbers:
        """What a line of standard input asks for."""
        kind, waves = question.split()
        if kind == "stages" and self._stopwatch is None:
            self._stopwatch = Stopwatch()
            self._stopwatch.wrap_all()
        found: Numbers = {}
        gc.collect()
        for batch in BATCHES:
            for _ in range(int(waves)):
                await self._life(batch, found)
        if self._stopwatch is not None:
            found["commits"] = {"apart": [self._stopwatch.apart]}
        return found

    async def _life(self, batch: int, found: Numbers) -> None:
        """`batch` messages a request are sent, received and deleted."""
        requests = self._requests
        sends = [requests.send(batch) for _ in range(CONNECTIONS)]
        receives = [requests.receive(batch) for _ in range(CONNECTIONS)]
        await self._wave(sends, found.setdefault(f"send {batch}", {}))
        answers = await self._wave(receives, found.setdefault(f"receive {batch}", {}))
        deletes = [requests.delete(answer, batch) for answer in answers]
        await self._wave(deletes, found.setdefault(f"delete {batch}", {}))

    async def _wave(self, requests: Wave, into: dict[str, list[float]]) -> Wave:
        if self._stopwatch is None:
            instructions, cpu_ns = self._instructions.read(), time.process_time_ns()
            answers = await self._connections.wave(requests)
            spent: dict[str, float] = {"cpu": (time.process_time_ns() - cpu_ns) / 1e3}
            if self._instructions.counted:
                spent["instructions"] = self._instructions.read() - instructions
        else:
            self._stopwatch.begin()
            answers = await self._connections.wave(requests)
            spent_ns = self._stopwatch.end()
            spent = {stage: spent_ns.get(stage, 0) / 1e3 for stage in (*STAGES, "rest")}
            into.setdefault("entered", []).append(len(STAGES.keys() & spent_ns.keys()))
        for name, value in spent.items():
            into.setdefault(name, []).append(round(value / CONNECTIONS, 3))
        _check(answers)
        return answers


def _check(answers: Wave) -> None:
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 200 "), answer[:500]


async def drive(loop: Loop, port: int, instructions: Instructions) -> None:
    """Answer the requests, then end the process without a shutdown: its data is thrown away."""
    while not (gc.isenabled() and gc.get_freeze_count()):  # noqa: ASYNC110 - the server's start, of which nobody tells
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    commit_on_the_loop()
    requests = Requests(port)
    connections = Connections(loop.factories[port])
    _check(await connections.wave([requests.create()]))
    lane = Lane(connections, requests, instructions)
    while question := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await lane.answer(question)), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    libc = ctypes.CDLL(None)
    if not libc.personality(0xFFFFFFFF) & NO_RANDOMIZE and libc.personality(NO_RANDOMIZE) != -1:
        os.execv(sys.executable, [sys.executable, *sys.argv])
    instructions = Instructions()  # before the server's threads are there, which it counts too
    kept = socket.socket()  # bound and not listening, so that nobody else is given its port; the server may have it
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    port = kept.getsockname()[1]
    credentials = options.data.with_suffix(".toml")
    credentials.touch(mode=0o600)
    credentials.write_text(f'[[account]]\nid = "{ACCOUNT}"\n[[account.key]]\nid = "{KEY}"\nsecret = "{SECRET}"\n')

    class Driven(Loop):
        async def create_server(self, factory: Any, *args: Any, **given: Any) -> Any:
            server = await super().create_server(factory, *args, **given)
            if port in self.factories and not hasattr(self, "driving"):
                self.driving = self.create_task(drive(self, port, instructions))
                self.driving.add_done_callback(_end)
            return server

    uvloop.Loop = Driven
    module, _, function = tomllib.loads((options.tree / "pyproject.toml").read_text())["project"]["scripts"][
        "veilmq"
    ].partition(":")
    ports = ["--sqs", f"127.0.0.1:{port}"]
    for name in ("azure", "mns", "admin"):
        ports += [f"--{name}", "127.0.0.1:0"]
    given = ["--data", str(options.data), "--credentials", str(credentials), "--log-level", "warning"]
    sys.argv = ["veilmq", "serve", *given, *ports]
    found = importlib.import_module(module)
    assert Path(str(found.__file__)).is_relative_to(options.tree.resolve()), f"{found.__file__} is not of the tree"
    getattr(found, function)()


def _end(driving: asyncio.Task[None]) -> None:
    """Something failed: say so, and end."""
    if driving.cancelled() or driving.exception() is not None:
        driving.print_stack()
        print(repr(None if driving.cancelled() else driving.exception()), file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    main()
