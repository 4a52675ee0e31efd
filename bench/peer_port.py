"""What a request costs more when it comes to a server that does not own the shard: CPU of both sides.

    python bench/peer_port.py

Strategy: 32 clients send, receive and delete in a closed loop: first in the owner's own process, then from a second
process over the peer port. No HTTP in either case. The difference is the peer port's: of the owner, what its process
takes more than before without the clients' own part, which the second process has then.
"""

import asyncio
import resource
import tempfile
import time
from hashlib import md5
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from veilmq.cluster import Calls
from veilmq.cluster.peer import Identity
from veilmq.cluster.peer.caller import Caller
from veilmq.cluster.peer.port import PeerPort
from veilmq.engine.directory import open_directory
from veilmq.model.commands import CreateQueue, Delete, Origin, Receive, Send
from veilmq.model.outcomes import Received, Sent
from veilmq.model.settings.queue import QueueKey
from veilmq.server.clock import LeaseClock
from veilmq.server.shell import Shell

CLIENTS = 32
LIVES = 600
SECRET = b"a secret of all servers"
ORIGIN = Origin("sqs", "key", "Boto3/1.40 md/Botocore#1.40 ua/2.1 os/linux md/arch#x86_64 lang/python#3.11")
QUEUE = QueueKey("000000000000", "us-east-1", "jobs")
BODY = "x" * 200


async def lives(calls: Calls) -> None:
    send = Send(
        queue=QUEUE,
        origin=ORIGIN,
        body=BODY,
        md5=md5(BODY.encode(), usedforsecurity=False).digest(),
        size_bytes=len(BODY),
    )
    take = Receive(queue=QUEUE, origin=ORIGIN, lease_us=3_600_000_000)
    for _ in range(LIVES):
        (sent,) = await calls.call(send)
        assert type(sent) is Sent, sent
        (received,) = await calls.call(take)
        assert type(received) is Received, received
        handle = received.messages[0].handle
        await calls.call(Delete(queue=QUEUE, origin=ORIGIN, handle=handle, arrived=calls.arrived()))


async def load(calls: Calls) -> tuple[float, float]:
    """CPU of this process for each request, and requests a second."""
    await asyncio.gather(*(lives(calls) for _ in range(4)))
    before, begun = cpu_us(), time.perf_counter()
    await asyncio.gather(*(lives(calls) for _ in range(CLIENTS)))
    count = CLIENTS * LIVES * 3
    return (cpu_us() - before) / count, count / (time.perf_counter() - begun)


def cpu_us() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return (used.ru_utime + used.ru_stime) * 1e6


async def call(pipe: Connection, address: tuple[str, int]) -> None:
    caller = Caller(address, Identity("c", "other"), SECRET, LeaseClock(), lambda *returned: None)
    caller.start()
    pipe.send(await load(caller))
    await caller.close()


def other(pipe: Connection) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(call(pipe, pipe.recv()))


async def own(directory: Path, pipe: Connection) -> None:
    engine, store = open_directory(directory)
    shell = Shell(engine, store, LeaseClock())
    shell.start()
    await shell.call(CreateQueue(queue=QUEUE, origin=ORIGIN))
    alone_us, alone_rate = await load(shell)
    port = PeerPort(Identity("c", "owner"), SECRET)
    await port.open("127.0.0.1", 0)
    port.lead(shell, shell.engine.unread)
    before, commands = cpu_us(), shell.stats.commands
    pipe.send(port.address)
    caller_us, rate = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    owner_us = (cpu_us() - before) / (shell.stats.commands - commands)
    await port.close()
    await shell.stop(5)
    store.close()
    print(f"in the owner's process: {alone_us:.1f} us a request, {alone_rate:,.0f}/s")
    print(f"over the peer port: {owner_us:.1f} us at the owner, {caller_us:.1f} us at the other, {rate:,.0f}/s")
    print(f"the peer port itself, both sides: {owner_us + caller_us - alone_us:.1f} us")


def main() -> None:
    ours, theirs = Pipe()
    process = Process(target=other, args=(theirs,), daemon=True)
    process.start()
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(own(Path(directory) / "data", ours))
    process.join()


if __name__ == "__main__":
    main()
