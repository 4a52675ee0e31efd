"""What commands print: into any encoding, and to a file that may be full or a pipe that may close.

Strategy: a character that stdout cannot take is written as JSON writes it (`\\u20ac`), so that what was printed stays
JSON where it was. What is left in the buffer is flushed by the command itself: at its exit the interpreter would say
what went wrong in words of its own.
"""

import codecs
import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any, Final

OUTPUT_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What a file says that takes no more."""
_ESCAPED: Final = "veilmq.escaped"
_DRIVING: Final = re.compile("[\x7f-\x9f]")
"""Control characters that JSON need not escape, and terminals obey: a message's body may have them."""


def _escape(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def in_json(value: Any, default: Callable[[Any], object] | None = None) -> str:
    """A value in one line; default: what JSON does not know as something that it does."""
    return tamed(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=default))


def tamed(text: str) -> str:
    """JSON that says the same and drives no terminal."""
    return _DRIVING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def prepare_output() -> None:
    """Let stdout take every character; a stream that was closed when the command was started is /dev/null."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    codecs.register_error(_ESCAPED, _escape)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=_ESCAPED)


def flush_output() -> None:
    """Write what is in the buffer. Raises OSError."""
    sys.stdout.flush()


def drop_output() -> None:
    """Forget what is in the buffer, which nobody takes: the interpreter would complain of it at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
