"""The command `veilmq`, also as `python -m veilmq`: Ctrl-C ends it without a traceback, whenever it comes.

Strategy: while modules are imported, and after the command's end, there is nothing to end in order, so SIGINT is left
to the system, which ends the process. In between it raises KeyboardInterrupt, as Python has it. A SIGINT that is
ignored, as in a shell's background, stays ignored.
"""

import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_INTERRUPTED = 130
"""128 and the signal's number, as shells tell it."""


def main() -> None:
    """Run the command that the arguments name."""
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not heeds:
        from veilmq.cli import main as command

        command()
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from veilmq.cli import main as command

    sys.unraisablehook = _unraisable
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            command()
        finally:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None


def _unraisable(error: "UnraisableHookArgs") -> None:
    """An interrupt amid a finalizer cannot go on from there: Python would print it, and drop it."""
    if issubclass(error.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    sys.__unraisablehook__(error)


if __name__ == "__main__":
    main()
