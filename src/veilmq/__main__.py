"""The command `veilmq`, also as `python -m veilmq`: Ctrl-C ends it without a traceback once this module runs.

Strategy: while modules are imported, and after the command's end, there is nothing to end in order, so SIGINT is left
to the system, which ends the process; this module does that before it imports anything that takes time. In between it
raises KeyboardInterrupt, as Python has it. A SIGINT that is ignored, as in a shell's background, stays ignored. While
Python itself starts and reads the installed script, nothing of ours can run.

The system leaves out its own handling of SIGTERM and SIGINT for process 1, as which a container's program runs. There
this module handles them, so that they end the process at once.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from sys import UnraisableHookArgs
else:
    import _signal as signal  # built in; the module signal imports enum, collections and more

_HEEDS = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _HEEDS:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import os  # noqa: E402
import sys  # noqa: E402

_INTERRUPTED = 130
"""128 and the signal's number, as shells report it."""


def _end_at_once(number: int, _: object) -> None:
    os._exit(128 + number)


_DEFAULT = _end_at_once if os.getpid() == 1 else signal.SIG_DFL
if _DEFAULT is _end_at_once:
    signal.signal(signal.SIGTERM, _DEFAULT)
    if _HEEDS:
        signal.signal(signal.SIGINT, _DEFAULT)


def main() -> None:
    """Run the command that the arguments name."""
    from veilmq.cli import main as command

    if not _HEEDS:
        command()
        return
    sys.unraisablehook = _unraisable
    try:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            command()
        finally:
            signal.signal(signal.SIGINT, _DEFAULT)
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None


def _unraisable(error: "UnraisableHookArgs") -> None:
    """An interrupt amid a finalizer cannot go on from there: Python would print it, and drop it."""
    if issubclass(error.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGINT, _DEFAULT)
        signal.raise_signal(signal.SIGINT)
    sys.__unraisablehook__(error)


if __name__ == "__main__":
    main()
