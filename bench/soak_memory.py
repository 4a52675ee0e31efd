"""Where a server's memory is, asked of the living process: which allocator holds how much, and which objects exist.

Strategy: `watched()` makes a directory whose `sitecustomize.py` imports this file, and puts it on the path of the
server that is started meanwhile. There a thread waits for words on a named pipe and writes one JSON line for each:
`look` (what the kernel, malloc, SQLite and Python say), `objects` (also which types and which containers, and what each
allocator says for itself), `trim` (as `look`, after malloc gave its free pages back: what remains is in use). Other
modules may add words (`loop_turns`). The server's own code knows nothing of it.
"""

import ctypes
import gc
import json
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_VARIABLE = "SOAK_MEMORY"
_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def look() -> dict[str, Any]:
    """Bytes: of the process by the kernel; held and free in malloc, all arenas; blocks of Python."""
    rollup = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    kernel = {name: int(rollup[name].split()[0]) * 1024 for name in ("Rss", "Anonymous", "Private_Dirty")}
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    held = libc.mallinfo2()
    return {
        "at": time.time(),
        **kernel,
        "file": kernel["Rss"] - kernel["Anonymous"],
        "malloc_used": held.uordblks + held.hblkhd,
        "malloc_free": held.fordblks,
        "python_blocks": sys.getallocatedblocks(),
    }


def objects(directory: Path) -> dict[str, Any]:
    """A look with the counts of types, the longest containers, and two files: what malloc and pymalloc say."""
    found = look()
    gc.collect()
    alive = gc.get_objects()
    types = Counter(type(each).__qualname__ for each in alive)
    sized = sorted(
        ((len(each), each) for each in alive if isinstance(each, dict | list | set | tuple)), key=lambda pair: -pair[0]
    )
    longest = [f"{length} {type(each).__qualname__} {repr(next(iter(each), ''))[:60]}" for length, each in sized[:60]]
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    number = len(list(directory.glob("pymalloc-*")))
    for name, write in (
        (f"pymalloc-{number}", ctypes.pythonapi._PyObject_DebugMallocStats),
        (f"malloc-{number}", lambda stream: libc.malloc_info(0, stream)),
    ):
        stream = ctypes.c_void_p(libc.fopen(str(directory / name).encode(), b"w"))
        write(stream)
        libc.fclose(stream)
    return found | {"types": dict(types.most_common(25)), "longest": longest, "tracked": len(alive)}


def _trimmed() -> dict[str, Any]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return look()


WORDS: dict[str, Callable[[], dict[str, Any]]] = {
    "look": look,
    "objects": lambda: objects(Path(os.environ[_VARIABLE])),
    "trim": _trimmed,
}


def begin() -> None:
    """Answer in this process, a server."""
    directory = Path(os.environ[_VARIABLE])
    threading.Thread(target=_answer, args=(directory,), name="soak-memory", daemon=True).start()


def _answer(directory: Path) -> None:
    while True:
        for word in (directory / "asked").read_text().split():
            found = WORDS[word]()
            with (directory / "answers").open("a") as answers:
                answers.write(json.dumps({"word": word} | found) + "\n")


@contextmanager
def watched(directory: Path, *modules: str) -> Iterator[None]:
    """A server that starts meanwhile answers `ask(directory, ...)`. modules: of this folder, which it begins, too."""
    directory.mkdir()
    os.mkfifo(directory / "asked")
    names = ("soak_memory", *modules)
    for name in names:
        shutil.copy(Path(__file__).with_name(f"{name}.py"), directory)
    (directory / "sitecustomize.py").write_text("".join(f"import {name}\n{name}.begin()\n" for name in names))
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(each for each in (str(directory), before) if each)
    os.environ |= {_VARIABLE: str(directory), "PYTHONPATH": path}
    try:
        yield
    finally:
        del os.environ[_VARIABLE], os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def ask(directory: Path, word: str, seconds: float = 30) -> dict[str, Any]:
    """The server's answer to that word. Raises TimeoutError."""
    answers = directory / "answers"
    count = len(answers.read_bytes().splitlines()) if answers.exists() else 0
    (directory / "asked").write_text(word + "\n")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        lines = answers.read_bytes().split(b"\n")[:-1] if answers.exists() else []
        if len(lines) > count:
            found: dict[str, Any] = json.loads(lines[-1])
            return found
        time.sleep(0.05)
    raise TimeoutError(f"no answer to {word}")
