"""`veilmq doctor`: what is wrong with an installation, in words, each with what to do; and what `veilmq` alone says.

Strategy: a check is a generator of `Finding`s about one thing, from the settings that `serve` would have. They
are in checks.py: those on the machine, then those on what is configured and on the data. One check writes a small
file, by whose sync the disk is measured. Beside a running server the queues are looked at through its admin port; a
directory that was closed is opened as the other commands do, which changes its files but no message, and leaves them
to the directory's owner. One whose server was killed is only read: what opening it changes may be what a repair needs.
"""

import errno
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from veilmq.cli.failures import DISK_ADVICE, MEMBER_FILE, Exit, Failure, check_command, repair_advice
from veilmq.cli.output import print_json, printable
from veilmq.model.wording import counted

if TYPE_CHECKING:
    from veilmq.cli.sources import Resolved
    from veilmq.server.config.settings import Settings
    from veilmq.store.directory import Holder


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """It works, but not as it should, or not for long."""
    ERROR = "error"
    """It does not work, or acknowledged messages are in danger."""


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    check: str
    level: Level
    text: str
    fix: str = ""
    """What to do or type."""


_SIGNS: Final = {Level.OK: "ok", Level.WARNING: "WARN", Level.ERROR: "FAIL"}
_USER: Final = "Is this user the one that the server runs as?"
_ADVICE: Final = {errno.EACCES: _USER, errno.EPERM: _USER, **DISK_ADVICE}
_NEXT: Final = """\
VeilMQ {version}: a durable message queue built around the visibility timeout.

{state}
    veilmq queues create jobs
    veilmq send jobs 'the first message'
    veilmq receive jobs --delete

Something is wrong:  veilmq doctor
All commands:        veilmq --help
A command:           veilmq COMMAND --help
Moving from SQS, Azure or an emulator:  veilmq import --help, veilmq bridge --help
Documentation:       docs/index.md in the source (a wheel has no pages); man veilmq where it is installed
"""
_NO_SERVER: Final = """\
No server holds ./veilmq-data. Start one, in development mode and on this machine alone, and leave it running:
    veilmq serve

Then in another terminal, in the same directory:"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    from veilmq.cli.sources import takes_settings

    as_json = inspect.Parameter(
        "as_json",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")],
    )
    app.command("doctor", help=_doctor.__doc__)(takes_settings(_doctor, as_json))


def next_steps() -> str:
    """What a person who typed `veilmq` alone can do."""
    import veilmq
    from veilmq.cli.access import DATA_DEFAULT
    from veilmq.store.directory import holder_of

    holder = holder_of(DATA_DEFAULT)
    if holder is None:
        state = _NO_SERVER
    else:
        where = ", ".join(f"{name} on {holder.url(name)}" for name in holder.listeners)
        state = f"A server runs on ./{DATA_DEFAULT} (pid {holder.pid}): {where}.\nTry:"
    return _NEXT.format(version=veilmq.__version__, state=state)


def _doctor(flags: dict[str, Any]) -> None:
    """Say what is wrong with this installation, and what to do about it.

    Takes the options, variables and file of `serve`, and looks at what a server has or would have with them. Exits 0 if
    all is well, 1 with warnings, 2 with errors.
    """
    from veilmq.cli.sources import resolve

    try:
        found = list(_examined(resolve(flags, os.environ)))
    except Failure as failure:
        found = [_failed("settings", failure)]
    if flags["as_json"]:
        for each in found:
            print_json({"check": each.check, "level": each.level.value, "text": each.text, "fix": each.fix})
    else:
        _show(found)
    levels = {each.level for each in found}
    if Level.ERROR in levels:
        raise typer.Exit(int(Exit.USAGE))
    raise typer.Exit(int(Exit.WRONG if Level.WARNING in levels else Exit.DONE))


def _show(found: list[Finding]) -> None:
    for each in found:
        print(f"{_SIGNS[each.level]:<4}  {each.check:<12} {printable(each.text)}")
        if each.fix:
            print(f"{'':<19}{printable(each.fix)}")
    wrong = [each for each in found if each.level is not Level.OK]
    errors = sum(each.level is Level.ERROR for each in wrong)
    warnings = counted(len(wrong) - errors, "warning")
    print(f"\n{counted(errors, 'error')}, {warnings}" if wrong else "\nall is well")


def _examined(resolved: "Resolved") -> Iterator[Finding]:
    from veilmq.cli.doctor import checks
    from veilmq.cli.doctor.ports import ports
    from veilmq.store.directory import free_and_floor, holder_of
    from veilmq.store.synchronised import is_synchronised

    settings = resolved.settings
    for name, meant in resolved.misspelt.items():
        yield Finding("settings", Level.WARNING, f"{name} is no setting", f"Did you mean {meant}?")
    holder = holder_of(settings.data)
    unseen = None if holder else checks.holder_without_lock(settings.data)
    place = _existing(settings.data)
    named: dict[str, Callable[[], Iterable[Finding]]] = {
        "versions": lambda: checks.versions(sys.version_info[:3]),
        "clock": lambda: checks.clock(synchronised=is_synchronised()),
        "open files": lambda: checks.open_files(checks.open_files_limit(holder), settings),
        "proxy": lambda: checks.proxies(os.environ),
        "directory": lambda: checks.directory(settings.data, holder),
        "disk": lambda: checks.space(place, *free_and_floor(place, settings.floor_bytes)),
        "fsync": lambda: checks.sync_speed(checks.sync_times(place)),
        "ports": lambda: ports(settings, holder),
        "credentials": lambda: checks.credentials(settings),
        "certificate": lambda: checks.certificate(settings),
        "server": lambda: checks.health(holder),
        "queues": lambda: _queues(settings, holder),
    }
    if unseen is not None:
        yield checks.lock_deleted(settings.data, unseen)
        for name in ("directory", "ports", "server", "queues"):  # which would look for one that has the lock
            del named[name]
    for name, check in named.items():
        try:
            yield from check()
        except Failure as failure:
            yield _failed(name, failure)
        except OSError as error:
            yield broken(name, error)


def _queues(settings: "Settings", holder: "Holder | None") -> Iterator[Finding]:
    from veilmq.cli.doctor import checks
    from veilmq.cli.release import look

    data = settings.data
    was_killed = (data / "veilmq.db").exists() and (data / "veilmq.db-wal").exists()
    if holder is not None or not was_killed or (data / MEMBER_FILE).exists():
        yield from checks.queues(settings, holder)
        return
    found = look(data)
    if found.refused:
        yield Finding("queues", Level.ERROR, found.refused)
    elif found.losses:
        yield Finding("queues", Level.ERROR, found.losses[0], repair_advice(data))
    else:
        check = check_command(data)
        text = f"not looked at: opening {data} would change it, and its server was killed or failed"
        yield Finding("queues", Level.WARNING, text, f"See whether it is damaged before you start it: {check}")


def broken(check: str, error: OSError) -> Finding:
    """What a check found that could not look."""
    where = f"{error.filename}: " if error.filename else ""
    return Finding(check, Level.ERROR, f"{where}{error.strerror}", _ADVICE.get(error.errno or 0, ""))


def _existing(path: Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    path = path.absolute()
    while not os.path.isdir(path) and path != path.parent:  # Path.is_dir raises where nobody may look
        path = path.parent
    return path


def _failed(check: str, failure: Failure) -> Finding:
    return Finding(check, Level.ERROR, str(failure), failure.advice)
