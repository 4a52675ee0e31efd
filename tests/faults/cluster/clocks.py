"""Wall clocks that can be set: a library that is loaded before the C library's own, and reads by how much from a file.

Strategy: only CLOCK_REALTIME is moved, and what else tells wall time. The clocks that nobody can set are as they are.
The file is mapped into memory, so that a step is seen at once by every process that has it.
"""

import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final

_SOURCE: Final = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *ahead;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SETTABLE_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(0, sizeof *ahead, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED) ahead = found;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && ahead && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *ahead;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    int failed = clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}
"""


def missing() -> str:
    """Why clocks cannot be set here."""
    return "" if shutil.which("cc") else "there is no C compiler, which clocks that can be set need"


def build(directory: Path) -> Path:
    """The library."""
    source, library = directory / "clock.c", directory / "clock.so"
    source.write_text(_SOURCE)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    library.chmod(0o755)
    return library


class WallClock:
    """The wall clock of processes that are started with `environment`."""

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        file.write_bytes(bytes(8))
        file.chmod(0o644)
        self.environment = {"LD_PRELOAD": str(library), "SETTABLE_CLOCK": str(file)}

    def set_ahead(self, seconds: int) -> None:
        """By so many seconds of the machine's own clock; negative: behind it."""
        with self._file.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), struct.pack("q", seconds), 0)
