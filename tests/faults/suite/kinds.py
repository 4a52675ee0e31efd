"""The kinds of faults, each with what it does to a server under load.

Strategy: a kind strikes as often as its round's time allows. How a life may end is part of it: a server that meets an
I/O error ends itself with code 5, any other end than ours is a failure of the round.
"""

import os
import shutil
import signal
from pathlib import Path

from tests.faults.suite.stage import Kind, Stage

from veilmq.cli.failures import Exit
from veilmq.store.sqlite.store import CRASH_POINTS

LIFE_SECONDS = 0.8
_ENDS = {int(Exit.STORE), int(Exit.DIRECTORY)}
"""How a server ends itself that meets an error of its disk; the second at its start."""
DAY_SECONDS = 86_400
SMALL_DISK = "small disk"
PATTERNS = "topics and transactions"


def kills(stage: Stage) -> None:
    """At random moments, soon after it listens."""
    while not stage.over:
        stage.server.start()
        stage.pause(0, LIFE_SECONDS)
        stage.strikes += 1
        stage.kill()


def kills_in_recovery(stage: Stage) -> None:
    """Again and again before it listens, then once under load."""
    while not stage.over:
        for _ in range(stage.chance.randint(1, 4)):
            stage.server.spawn()
            stage.pause(0, 0.15)
            stage.strikes += 1
            stage.kill()
        stage.server.start()
        stage.pause(0, LIFE_SECONDS)
        stage.kill()


def deaths_at_points(stage: Stage) -> None:
    """By its own hand, between two steps of the store."""
    while not stage.over:
        point = stage.chance.choice(CRASH_POINTS)
        stage.server.start(point=point, nth=stage.chance.randint(1, 40))
        if stage.server.ended(3):
            stage.strikes += 1
            stage.kills += 1
        else:  # too few passings
            stage.kill()


def stops(stage: Stage) -> None:
    """SIGSTOP, for shorter and longer than a lease; then SIGCONT, or SIGKILL."""
    stage.server.start()
    while not stage.over:
        stage.pause(0, 1)
        stage.server.send(signal.SIGSTOP)
        stage.strikes += 1
        stage.pause(0, stage.chance.choice((0.5, 4)))
        if stage.chance.random() < 0.3:
            stage.kill()
            stage.server.start()
        stage.server.send(signal.SIGCONT)


def disk_errors(stage: Stage) -> None:
    """EIO or ENOSPC from one write or sync. The server must end itself, or roll back and go on."""
    while not stage.over:
        call = stage.chance.choice(("fdatasync", "pwrite64", "pwritev", "fsync"))
        error = stage.chance.choice(("EIO", "ENOSPC"))
        _under_strace(stage, call, f"error={error}:when={stage.chance.randint(1, 150)}")


def slow_disk(stage: Stage) -> None:
    """Every twentieth sync takes longer, some of them longer than a lease."""
    while not stage.over:
        delay_us = stage.chance.choice((50_000, 400_000, 3_500_000))
        _under_strace(stage, "fdatasync", f"delay_enter={delay_us}:when={stage.chance.randint(1, 20)}+20")


def _under_strace(stage: Stage, call: str, injected: str) -> None:
    stage.server.start_under(
        "strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={call}", "-e", f"inject={call}:{injected}"
    )
    stage.strikes += 1
    if stage.server.ended(stage.chance.uniform(2, 8)):
        code = stage.server.exit_code
        assert code in _ENDS, f"{injected} of {call}: the server ended with {code}"
        stage.server.kill()
    else:
        stage.kill()


def full_disk(stage: Stage) -> None:
    """The disk fills up at once or bit by bit, and gets space again; sometimes the server is killed meanwhile."""
    ballast = stage.server.data.parent / "ballast"
    stage.server.start()
    while not stage.over:
        stage.pause(0, 1)
        _fill(ballast, stage)
        stage.strikes += 1
        stage.pause(0, 2)
        if stage.chance.random() < 0.3:
            stage.kill()
            stage.server.start()  # on a full disk it may end again
            stage.pause(0, 1)
        ballast.unlink()
        if not stage.server.alive:
            stage.server.start()


def _fill(ballast: Path, stage: Stage) -> None:
    """With all that there is, but sometimes for the last pieces."""
    left = stage.chance.choice((0, 0, 65_536, 1_048_576))
    with ballast.open("wb", buffering=0) as file:
        try:
            while shutil.disk_usage(ballast.parent).free > left:
                file.write(bytes(65_536))
            while not left:
                file.write(bytes(4_096))
        except OSError:
            pass


def moved_clock(stage: Stage) -> None:
    """A start days ahead, before anything is held; then jumps in both directions, in a life and between two.

    The data's clock never goes back, so after the first start every later one is behind it: a start on a clock that is
    ahead of the data cannot tell that from the time that the server was off, and counts it as passed.
    """
    shift = stage.server.data.parent / "shift"
    ahead = stage.chance.randint(1, 20) * DAY_SECONDS + (int(shift.read_text()) if shift.exists() else 0)
    shift.write_text(str(ahead))
    stage.server.start(shift=str(shift))
    while not stage.over:
        stage.pause(0, 2)
        stage.strikes += 1
        moved = ahead - stage.chance.choice((600, 3_600, DAY_SECONDS, 40 * DAY_SECONDS))
        shift.write_text(str(moved))
        if stage.chance.random() < 0.5:
            stage.kill()
            stage.server.start(shift=str(shift))
        else:  # a jump ahead in a life: the clock bends by 500 parts in a million, and leases are not shorter
            stage.pause(0, 1)
            shift.write_text(str(ahead))
    shift.write_text(str(ahead))


def bad_network(stage: Stage) -> None:
    """Connections that are cut, stall, or lose an answer; sometimes all at once."""
    stage.server.start()
    while not stage.over:
        stage.proxy.mode = stage.chance.choice(("cut", "stall", "swallow"))
        before = stage.proxy.struck
        stage.pause(0.5, 2)
        if stage.chance.random() < 0.3:
            stage.proxy.cut_all()
        stage.strikes += stage.proxy.struck - before
    stage.proxy.mode = "pass"


def _without_strace() -> str:
    return "" if shutil.which("strace") else "there is no strace"


def _without_root() -> str:
    return "" if os.geteuid() == 0 else "a small disk is mounted by root alone"


KINDS = (
    Kind("kill", kills, weight=6),
    Kind("kill in recovery", kills_in_recovery, weight=4),
    Kind("death at a point", deaths_at_points, weight=3),
    Kind("stop", stops),
    Kind("disk error", disk_errors, missing=_without_strace),
    Kind("slow disk", slow_disk, missing=_without_strace),
    Kind("full disk", full_disk, missing=_without_root, place=SMALL_DISK),
    Kind("moved clock", moved_clock, place="moved clock"),
    Kind("bad network", bad_network, proxied=True),
    Kind(f"kill amid {PATTERNS}", kills, weight=2, place=PATTERNS),
    Kind(f"stop amid {PATTERNS}", stops, place=PATTERNS, is_long=True),
    Kind(f"bad network amid {PATTERNS}", bad_network, proxied=True, place=PATTERNS, is_long=True),
    Kind(
        f"full disk amid {PATTERNS}", full_disk, missing=_without_root, place=f"{SMALL_DISK}, {PATTERNS}", is_long=True
    ),
)
