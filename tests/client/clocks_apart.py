"""Machines whose clocks differ, and what they share: a database or an object store, whose own clock tests move."""

import os
import sqlite3
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import fsspec

from veilmq.client.clock import Clock
from veilmq.testing.client_contract.stage import MovableClock

Connection = TypeVar("Connection", bound=sqlite3.Connection)
HOUR = 3_600.0


class Apart:
    """The clock of another machine: it booted at another time, and its wall clock is `seconds` ahead."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds

    def monotonic(self) -> float:
        return self._clock.monotonic() + 12_345

    def wall(self) -> float:
        return self._clock.wall() + self._seconds


def by(wall: Callable[[], float], connection: Connection) -> Connection:
    """The connection, whose own `now` is `wall()`, Unix seconds: every statement judges by that."""
    connection.create_function("julianday", 1, lambda _: wall() / 86_400 + 2_440_587.5)
    return connection


def pass_time(directory: Path, clock: MovableClock, seconds: float) -> None:
    """For the clock, and for what was written into the directory or into memory."""
    clock.advance(seconds)
    for path in directory.iterdir():
        there = path.stat()
        os.utime(path, (there.st_atime, there.st_mtime - seconds))
    for each in fsspec.filesystem("memory").store.values():
        each.created -= timedelta(seconds=seconds)
        each.modified -= timedelta(seconds=seconds)
