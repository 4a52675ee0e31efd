"""The command line, and the composition root: the one reader of arguments and environment.

Strategy: this module declares the commands and imports almost nothing; a command's imports happen when it runs, so that
`--help` and a server's first response come quickly. `serve` has a package, as have those that run clients of a queue
(`work`), the commands of Spark (`pipeline`), those on queues and messages (`remote`) and those that look (`history`);
the ones on a directory are in directory.py.
"""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

import veilmq
from veilmq import accelerator
from veilmq.cli.failures import Exit, Failure, end, end_without
from veilmq.cli.output import OUTPUT_FULL, drop_output, prepare_output

try:
    import typer
except ModuleNotFoundError as error:
    end_without(error)

from veilmq.cli.cluster import register as register_cluster
from veilmq.cli.doctor import next_steps
from veilmq.cli.doctor import register as register_doctor
from veilmq.cli.help import adapt
from veilmq.cli.history import register as register_history
from veilmq.cli.migrate import register as register_migrate
from veilmq.cli.pipeline import register as register_pipeline
from veilmq.cli.release import register as register_release
from veilmq.cli.remote import register
from veilmq.cli.signals import ended_by_interrupt
from veilmq.cli.work import register as register_work
from veilmq.cli.work import register_verify

_ORDER: Final = (
    "serve", "doctor", "version", "queues", "send", "receive", "extend", "delete", "peek", "purge", "messages",
    "find", "trace", "events", "templates", "topics", "moves", "jobs", "quarantine", "workers", "top", "accounts",
    "console", "work", "calibrate", "bridge", "import", "verify", "keys", "backup", "restore", "check", "upgrade",
    "clock", "cluster", "pipeline",
)  # fmt: skip
"""The commands as `veilmq --help` lists them: what a new user needs first, then what is done together."""
_PLACES: Final = {name: place for place, name in enumerate(_ORDER)}
_EPILOG: Final = (
    "Exit codes: 0 done; 1 found something wrong or was refused; 2 a flag, variable or file is wrong; 3 the data "
    "directory is held, open to others, of another release or not ours; 4 a port is in use or nobody answers; 5 the "
    "store failed."
)

Json = Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")]
# Typer need not check for readability: the commands report problems of a directory or file with advice.
Data = Annotated[
    Path,
    typer.Option(
        "--data", metavar="DIR", envvar="VEILMQ_DATA", help="The data directory.", show_default=True, readable=False
    ),
]

Admin = Annotated[
    str | None, typer.Option("--admin", metavar="HOST:PORT", help="Ask this server, not the directory's owner.")
]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="Its token, if not DIR/admin-token.", readable=False)
]


def application() -> typer.Typer:
    """All commands."""
    from veilmq.cli.sources import takes_settings

    app = typer.Typer(
        name="veilmq",
        help="A durable message queue built around the visibility timeout.",
        epilog=_EPILOG,
        invoke_without_command=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    app.command("serve", help=_serve.__doc__, epilog=_EPILOG)(takes_settings(_serve))
    keys = typer.Typer(help="Make access keys, and keys for encryption.", no_args_is_help=True, rich_markup_mode=None)
    keys.command("new")(_new_key)
    app.add_typer(keys, name="keys")
    app.command("backup")(_backup)
    app.command("restore")(_restore)
    app.command("check")(_check)
    register(app)
    register_history(app)
    register_work(app)
    register_verify(app)
    register_migrate(app)
    register_doctor(app)
    register_cluster(app)
    register_pipeline(app)
    register_release(app)
    return app


@cache
def _command() -> Any:
    """All commands, ready to run. They take 20 ms to build, and a process may run several."""
    command: Any = typer.main.get_command(application())
    command.commands = dict(sorted(command.commands.items(), key=lambda named: _PLACES.get(named[0], len(_PLACES))))
    adapt(command)
    return command


def main() -> None:
    """Run the command in the arguments."""
    prepare_output()
    try:
        try:
            _command()(prog_name="veilmq")
        finally:
            sys.stdout.flush()
    except Failure as failure:
        end(failure)
    except accelerator.AcceleratorMissing as missing:
        end(Failure(Exit.USAGE, str(missing)))
    except ModuleNotFoundError as error:
        end_without(error)
    except BrokenPipeError:  # the reader of our output has gone
        drop_output()
        raise SystemExit(int(Exit.WRONG)) from None
    except OSError as error:
        if error.filename is not None or error.errno not in OUTPUT_FULL:
            raise
        drop_output()
        end(Failure(Exit.WRONG, f"the output could not be written: {error.strerror}"))


def _print_version(wanted: bool) -> None:
    if wanted:
        accelerator.check_value()
        print(f"veilmq {veilmq.__version__}, accelerator {accelerator.status}")
        raise typer.Exit


def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    del version
    if context.invoked_subcommand is None:
        print(next_steps(), end="")


def _serve(flags: dict[str, Any]) -> None:
    """Serve queues over SQS, Azure Queue Storage and MNS until SIGTERM or SIGINT.

    SIGHUP reads the credentials file, the certificate and the issuer's keys again.

    Every flag can also be given as VEILMQ_NAME in the environment, or as name in the TOML file of --config.
    """
    with ended_by_interrupt():  # a module's import may swallow a KeyboardInterrupt, and then the server would start
        from veilmq.store.sqlite.memory import count_no_memory

        count_no_memory()
        from veilmq.cli.serve import serve
        from veilmq.cli.serve.systemd import manager_of
        from veilmq.cli.sources import resolve

    raise typer.Exit(int(serve(resolve(flags, os.environ), manager_of(os.environ))))


def _new_key(
    account: Annotated[
        str | None, typer.Option("--account", metavar="ID", help="The key's account, 12 digits [a new account].")
    ] = None,
    as_json: Json = False,
    encryption: Annotated[
        bool, typer.Option("--encryption", help="A key for encrypted queues, as JSON, and no access key.")
    ] = False,
    algorithm: Annotated[
        str | None,
        typer.Option("--algorithm", metavar="NAME", help="What it encrypts with, as in RFC 7518, 5.1 [A256GCM]."),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="FILE", help="Add it to this file, or make it, mode 0600."),
    ] = None,
    decrypts_only: Annotated[
        bool, typer.Option("--decrypts-only", help="Add it before the others: the file's last key encrypts.")
    ] = False,
) -> None:
    """Make an access key, and print it as part of a credentials file or add it to one.

    The secret is not stored anywhere else.
    """
    from veilmq.cli.keys import new_encryption, new_key

    if encryption:
        if account is not None:
            raise Failure(Exit.USAGE, "--account: the key of an encrypted queue has no account")
        print(new_encryption(algorithm or "A256GCM", into, encrypts=not decrypts_only, as_json=as_json))
        return
    of_encryption = {"--algorithm": algorithm is not None, "--decrypts-only": decrypts_only}
    for option, is_given in of_encryption.items():
        if is_given:
            raise Failure(Exit.USAGE, f"{option}: it is for --encryption alone")
    print(new_key(account, as_json=as_json, into=into))


def _backup(
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="A directory that is empty or not there yet.")],
    data: Data = Path("veilmq-data"),
    admin: Admin = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Copy the data directory, also of a running server. Old receipt handles are void in the copy."""
    from veilmq.cli.access import Target, holder_access
    from veilmq.cli.directory import backup

    with holder_access(Target(admin, token_file, data), os.environ) as access:
        backup(data, destination, as_json=as_json, access=access)


def _restore(
    destination: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that is empty or not there yet.")],
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="SOURCE",
            envvar=["VEILMQ_ARCHIVE", "VEILMQ_CLUSTER"],
            help="A cluster's or archive's URL, or a backup.",
        ),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="INSTANT", help="Up to this instant, 2026-01-31T12:00:00Z [its end].")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the state of an instant into a new directory. Old receipt handles are void in it.

    Exits 1 if damage was found: the state may then be of an earlier instant.
    """
    from veilmq.cli.directory.restoring import restore

    if source is None:
        text = "--from: a cluster, an archive or a backup is needed"
        raise Failure(Exit.USAGE, text, "Without the option VEILMQ_ARCHIVE counts, or else VEILMQ_CLUSTER.")
    raise typer.Exit(int(restore(destination, source, to, as_json=as_json)))


def _check(
    data: Data = Path("veilmq-data"),
    admin: Admin = None,
    token_file: TokenFile = None,
    repair: Annotated[
        Path | None,
        typer.Option("--repair", metavar="NEW", help="Recover what can be read into NEW, while no server runs."),
    ] = None,
    backup: Annotated[
        Path | None,
        typer.Option("--backup", metavar="DIR", help="With --repair: the newest backup, for what is nowhere else."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check the files, every body's MD5, the leases and each queue's counts. Exits 1 if something is wrong.

    With --repair, everything that can be recovered is also written to a new directory. The old one is not changed.
    """
    from veilmq.cli.access import Target, holder_access
    from veilmq.cli.directory import check, write_new

    if repair is not None:
        if admin is not None:
            raise Failure(Exit.USAGE, "--repair: it works on files, and no server may run on them")
        raise typer.Exit(int(write_new(data, repair, backup, as_json=as_json)))
    if backup is not None:
        raise Failure(Exit.USAGE, "--backup: it is for --repair alone")
    with holder_access(Target(admin, token_file, data), os.environ) as access:
        code = check(data, as_json=as_json, access=access)
    raise typer.Exit(int(code))
