"""Writes what a shell wants beside the program, from the commands themselves: the manual page and three completions.

    python tools/shell_files.py DIRECTORY

makes DIRECTORY/man/man1/veilmq.1, bash-completion/completions/veilmq, zsh/site-functions/_veilmq and
fish/vendor_completions.d/veilmq.fish: the places below /usr/share or /usr/local/share where man and the shells look.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.core
import typer.main
from typer.completion import get_completion_script

import veilmq
from veilmq.cli import application
from veilmq.cli.sources import CONFIG
from veilmq.server.config.settings import FIELDS

NAME = "veilmq"
PAGE = Path("man/man1/veilmq.1")
COMPLETIONS = {
    "bash": Path("bash-completion/completions/veilmq"),
    "zsh": Path("zsh/site-functions/_veilmq"),
    "fish": Path("fish/vendor_completions.d/veilmq.fish"),
}
FILES = {
    "veilmq-data": "The data directory, unless --data or VEILMQ_DATA names another one.",
    "DIR/admin-token": "The bearer token of the admin port, in the data directory.",
    "/etc/veilmq/veilmq.toml": "The settings of a server that was installed as a service.",
}


_OF_SERVE = {*FIELDS, CONFIG}


def main() -> None:
    directory = Path(sys.argv[1])
    write(directory / PAGE, page())
    for shell, path in COMPLETIONS.items():
        write(directory / path, completion(shell))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def completion(shell: str) -> str:
    script = get_completion_script(prog_name=NAME, complete_var=f"_{NAME.upper()}_COMPLETE", shell=shell) + "\n"
    if shell != "zsh":
        return script
    # compinit loads the file as the function itself; typer's script defines that function, and is for ~/.zfunc.
    return script.replace(f"compdef _{NAME}_completion {NAME}", f'_{NAME}_completion "$@"')


def page() -> str:
    """The manual page (man(7))."""
    command: Any = typer.main.get_command(application())
    epilog = command.epilog.removeprefix("Exit codes: ").rstrip(".")
    lines = [
        f'.TH VEILMQ 1 "" "VeilMQ {veilmq.__version__}" "VeilMQ"',
        ".SH NAME",
        f"veilmq \\- {escaped(command.help[0].lower() + command.help[1:].rstrip('.'))}",
        ".SH SYNOPSIS",
        ".B veilmq",
        ".I COMMAND",
        "[\\fIOPTIONS\\fR]",
        ".SH DESCRIPTION",
        "One program serves, administers, moves and works queues. Without a command it says how to begin.",
        "Times are written 30s, 500ms, 5m, 2h, 4d; a number alone is seconds.",
        ".SH COMMANDS",
        *(line for words, leaf in leaves(command) for line in section(words, leaf)),
        ".SH EXIT STATUS",
    ]
    for each in epilog.split("; "):
        number, _, text = each.partition(" ")
        lines += [".TP", f".B {number}", sentence(text)]
    lines.append(".SH FILES")
    for name, text in FILES.items():
        lines += [".TP", f".I {escaped(name)}", sentence(text)]
    lines += [".SH ENVIRONMENT", "Each option of", ".B veilmq serve", "is also a variable: VEILMQ_ and its name."]
    for name, options in variables(command).items():
        lines += [".TP", f".B {escaped(name)}", sentence(f"As {', '.join(options)}")]
    lines += [".SH SEE ALSO", "The documentation is in the directory docs of the source."]
    return "\n".join(lines) + "\n"


def leaves(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(command, typer.core.TyperGroup):
        yield path, command
        return
    for name, each in sorted(command.commands.items()):
        if not each.hidden:
            yield from leaves(each, *path, name)


def section(words: tuple[str, ...], leaf: Any) -> Iterator[str]:
    """One command."""
    yield f".SS {escaped(' '.join((NAME, *words)))}"
    arguments = [each for each in leaf.params if each.param_type_name == "argument"]
    shown = (f"\\fI{escaped(each.metavar or each.name.upper())}\\fR" for each in arguments)
    yield f"\\fB{escaped(' '.join((NAME, *words)))}\\fR {' '.join(shown)} [\\fIOPTIONS\\fR]"
    for paragraph in (leaf.help or "").split("\n\n"):
        yield ".PP"
        yield sentence(" ".join(paragraph.split()))
    for each in leaf.params:
        if words == ("doctor",) and each.name in _OF_SERVE:
            continue
        yield ".TP"
        if each.param_type_name == "argument":
            yield f".I {escaped(each.metavar or each.name.upper())}"
        else:
            flags = ", ".join([*each.opts, *each.secondary_opts])
            value = "" if each.is_flag or not each.metavar else f" \\fI{escaped(each.metavar)}\\fR"
            yield f"\\fB{escaped(flags)}\\fR{value}"
        yield sentence(each.help or "")


def variables(command: Any) -> dict[str, list[str]]:
    """Variables that are no setting of `serve`, and the options or arguments that they stand for."""
    found: dict[str, list[str]] = {}
    for words, leaf in leaves(command):
        for each in leaf.params:
            names = each.envvar if isinstance(each.envvar, list) else [each.envvar] if each.envvar else []
            flag = each.opts[0] if each.param_type_name == "option" else each.metavar
            for name in names:
                found.setdefault(name, []).append(f"{flag} of {' '.join(words)}")
    return dict(sorted(found.items()))


def sentence(text: str) -> str:
    """Text with an end, that no line of it is taken for a request."""
    shown = escaped(text if not text or text.endswith((".", "]", ":")) else f"{text}.")
    return f"\\&{shown}" if shown.startswith((".", "'")) else shown


def escaped(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-").replace("’", "'")


if __name__ == "__main__":
    main()
