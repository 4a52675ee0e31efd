"""A process that has loaded the server, and forks one for each line that it reads.

Strategy: a start that need not load Python's modules again takes a tenth of the time, so that a server can be killed
every second. What is forked has no thread and no file of its parent; from then on it is `veilmq serve`, or the same
service with a death at a named point or a wall clock that is moved. Each line is an `Asked` as JSON, each answer a pid.
How each ended is a line of the file `ends_of` its log.
"""

import asyncio
import contextlib
import ctypes
import importlib
import os
import signal
import sys
import traceback
from functools import partialmethod
from pathlib import Path

import msgspec
from tests.support.crashing import die_at

from veilmq.model.instant import Instant
from veilmq.server.auth import DevelopmentKeyring
from veilmq.server.clock import LeaseClock, wall
from veilmq.server.config.settings import Address, Settings
from veilmq.server.service import Service

_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG: no server outlives the fork server, whatever ends that."""


class Asked(msgspec.Struct):
    """A server to start."""

    options: list[str]
    """Of `veilmq serve`."""
    log: str
    data: str
    ports: list[int]
    """SQS, Azure, MNS."""
    point: str = ""
    """It dies there, at the `nth` passing."""
    nth: int = 0
    shift: str = ""
    """A file with the seconds by which its wall clock is ahead."""
    snapshot_bytes: int = 0
    """A server of a cluster writes a snapshot when the log has so many since the last one; 0: as it does by itself."""


def ends_of(log: Path) -> Path:
    """The file in which the fork server notes how each server that writes this log has ended."""
    return log.with_suffix(".ends")


def shifted(path: str) -> LeaseClock:
    """A lease clock whose wall time is moved by what the file says now."""
    file = Path(path)
    return LeaseClock(lambda: Instant(wall() + int(file.read_text()) * 1_000_000), is_synchronised=lambda: False)


async def _service(asked: Asked) -> None:
    sqs, azure, mns = (Address("127.0.0.1", port) for port in asked.ports)
    settings = Settings(data=Path(asked.data), sqs=sqs, azure=azure, mns=mns, history_s_max=60)
    clock = shifted(asked.shift) if asked.shift else LeaseClock()
    at_point = die_at(asked.point, asked.nth) if asked.point else lambda point: None
    service = Service(settings, DevelopmentKeyring(), clock, at_point)
    await service.start()
    await service.failed


def _child(asked: Asked) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    log = os.open(asked.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.closerange(3, 256)
    if asked.point or asked.shift:
        asyncio.run(_service(asked))
    else:
        from veilmq.__main__ import main

        if asked.snapshot_bytes:
            from veilmq.cluster.member import Member

            often = partialmethod(Member.__init__, snapshot_bytes=asked.snapshot_bytes)
            Member.__init__ = often  # type: ignore[assignment, method-assign]
        sys.argv = ["veilmq", "serve", *asked.options]
        main()


def run() -> None:
    """Fork until the input ends."""
    importlib.import_module("veilmq.cli.serve")
    read = msgspec.json.Decoder(Asked).decode
    ends = Path(os.devnull)

    def note_ends(number: int, frame: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                code = os.waitstatus_to_exitcode(ended[1])
                how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                with ends.open("a") as file:
                    file.write(f"{ended[0]}: {how}\n")

    signal.signal(signal.SIGCHLD, note_ends)
    while line := os.read(0, 65_536):  # one line at a time: the other side waits for each answer
        asked = read(line)
        ends = ends_of(Path(asked.log))
        pid = os.fork()
        if not pid:
            code = 1
            try:
                _child(asked)
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            except BaseException:  # noqa: BLE001 it ends here, and its log is to say why
                traceback.print_exc()
            finally:
                os._exit(code)
        os.write(1, b"%d\n" % pid)


if __name__ == "__main__":
    run()
