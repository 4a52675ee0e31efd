"""The accelerator: what a request spends most in, in C, where it was built. Without it the same is done in Python.

Strategy: each function in C has a twin in Python, which decides what is right; tests compare the two. A twin that has a
whole counterpart is decorated with `accelerated`. A `shortcut` only does what is plain, and returns None for anything
else, which its twin then does; without the accelerator there is no shortcut. The choice is made once, when the process
begins, by the environment variable `VEILMQ_ACCELERATOR`:

    auto   use it if it was built (the default)
    on     the same, but `veilmq serve` refuses to start without it
    off    do not use it

In any case of letters; with another value whatever would use it refuses.

Before changing it: bytes from outside are read in C. `make fuzz` and `make sanitized` look for what is wrong.
"""

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar
from zlib import crc32

VARIABLE: Final = "VEILMQ_ACCELERATOR"


class AcceleratorMissing(Exception):
    """It is asked for, but it cannot be used here; or the variable has a value that it may not have."""


def _load(wanted: str) -> tuple[ModuleType | None, str]:
    """The module in C if it is to be used, and the status."""
    if wanted == "off":
        return None, f"off ({VARIABLE})"
    try:
        native = importlib.import_module("veilmq.accelerator._native")
    except ModuleNotFoundError:
        return None, "off (not built)"
    except ImportError as error:
        return None, f"off (cannot be loaded: {error})"
    sources = sorted(Path(__file__).parent.glob("[!.]*.[ch]"))  # none in a wheel, and an editor's hidden files are none
    try:
        checksum = crc32(b"".join(path.read_bytes() for path in sources)) & 0x7FFFFFFF
    except OSError as error:
        return None, f"off (its sources cannot be read: {error})"
    if sources and native.sources != checksum:
        return None, "off (built from other sources: make accelerator)"
    return native, "on"


_given = os.environ.get(VARIABLE) or "auto"
_wanted = _given.lower()
_native, status = _load(_wanted)
"""status: `on`, or `off` with the reason in brackets."""


def check_value() -> None:
    """Raises AcceleratorMissing for a value that the variable may not have."""
    if _wanted not in {"auto", "on", "off"}:
        raise AcceleratorMissing(f"{VARIABLE} is {_given!r}: it may be auto, on or off")


def check() -> None:
    """Raises AcceleratorMissing, which says what to do."""
    check_value()
    if _wanted == "on" and _native is None:
        build = "`make accelerator` in a checkout builds it, with a C compiler and Python's headers"
        raise AcceleratorMissing(f"{VARIABLE} is on, but the accelerator is {status}: {build}")


TWINS: Final[dict[str, tuple[Callable[..., Any], Callable[..., Any]]]] = {}
"""By name: the function in Python and that in C, where it is used."""

Function = TypeVar("Function", bound=Callable[..., Any])


def functions() -> tuple[str, ...]:
    """The names of all functions in C; none if there are none in use."""
    return () if _native is None else tuple(_native.functions)


def accelerated(*constants: object) -> Callable[[Function], Function]:
    """Decorator: the function's counterpart in C; without one the function itself.

    constants: the types that the counterpart makes or expects, in the order of its comment.
    """

    def chosen(function: Function) -> Function:
        counterpart: Any = shortcut(function.__name__, *constants)
        if counterpart is None:
            return function
        TWINS[function.__name__] = function, counterpart
        return counterpart  # type: ignore[no-any-return]

    return chosen


def shortcut(name: str, *constants: object) -> Callable[..., Any] | None:
    """The function of that name in C; None without it. Raises AcceleratorMissing as `check_value` does."""
    check_value()
    return None if _native is None else _native.bind(name, constants)
