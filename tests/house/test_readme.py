"""The README runs: its code blocks, from top to bottom, in one temporary directory, against this checkout.

Strategy: the README shows what a reader types, so a block runs as it stands but for a few lines that a test cannot take
literally. Each of those has one replacement, here and nowhere else:

- `make run` serves: it becomes the command that the Makefile runs, in the background, on free ports and with its data
  in the temporary directory; the next line waits until it announces its ports. It is ended by pid, with SIGTERM, and
  must then exit 0.
- another `make TARGET` must be a target of the Makefile (`make --dry-run`), but is not run: it may be what runs this
  test.
- `pip install NAME ...`, by whatever path, must name packages that are installed here already, because the tests' lock
  has them.
- `.venv/bin/veilmq` is the one of the environment that runs the test: the directory gets a `.venv` that points to it.
- the ports 9324 and 9325 stand for the free ports that the server got, in every block from then on.

A `text` block right after a block is what that block prints. Blocks in other languages are for the eye.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from markdown_it import MarkdownIt
from tests.support.commands import bare

from veilmq.store.directory import read_holder
from veilmq.testing.for_each import for_each
from veilmq.testing.local import PORTS

ROOT = Path(__file__).parents[2]
BLOCK_SECONDS = 60
START_SECONDS = 60
STOP_SECONDS = 60


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its first line's number, its text, and what the README says that it prints."""

    language: str
    line: int
    text: str
    prints: str | None = None


def blocks(markdown: str) -> list[Block]:
    """The `bash` and `python` blocks of a page, in order."""
    found: list[Block] = []
    printer = False
    for token in MarkdownIt().parse(markdown):
        if token.type == "fence":
            language, start = token.info.strip(), (token.map or [0])[0] + 2
            if language in {"bash", "python"}:
                found.append(Block(language, start, token.content))
            elif language == "text" and printer:
                last = found.pop()
                found.append(Block(last.language, last.line, last.text, token.content))
            printer = language in {"bash", "python"}
        elif token.type == "heading_open":
            printer = False
    return found


@dataclass
class Reader:
    """Someone who follows the README in `directory`: the ports that stand for the README's, the servers started."""

    directory: Path
    ports: dict[str, str] = field(default_factory=dict)
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.directory / ".venv").symlink_to(sys.prefix)

    def run(self, block: Block) -> str:
        """Run one block and return what it printed to stdout. A failure names the README's line."""
        if block.language == "python":
            return self._finish([sys.executable, "-W", "error", "-c", self._on_its_ports(block.text)], block)
        script = "".join(self._command(line) for line in block.text.splitlines(keepends=True))
        return self._finish(["bash", "-euo", "pipefail", "-c", self._on_its_ports(script)], block)

    def _on_its_ports(self, text: str) -> str:
        return re.sub(r"\b(9324|9325)\b", lambda port: self.ports.get(port[0], port[0]), text)

    def _command(self, line: str) -> str:
        # Only such a line is taken apart: any other may be the middle of a quoted text.
        words = shlex.split(line, comments=True) if re.match(r"make |(\S*/)?pip install ", line) else []
        if words[:2] == ["make", "run"]:
            self._serve(words[2:])
            return "\n"
        if words[:1] == ["make"]:
            return f"make --directory {shlex.quote(str(ROOT))} --dry-run {shlex.join(words[1:])} >/dev/null\n"
        if [Path(word).name for word in words[:2]] == ["pip", "install"]:
            for name in words[2:]:
                metadata.version(name)
            return "\n"
        return line

    def _environment(self) -> dict[str, str]:
        admin = f"127.0.0.1:{self.ports.get('9325', '9325')}"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return bare(PATH=path, HOME=str(self.directory), LANG="C.UTF-8", VEILMQ_ADMIN=admin)

    def _serve(self, assignments: list[str]) -> None:
        arguments = [word for one in assignments for word in shlex.split(one.removeprefix("ARGS="))]
        free = [word for name in PORTS for word in (f"--{name}", "127.0.0.1:0")]
        command = [f"{Path(sys.executable).parent}/veilmq", "serve", "--data", "veilmq-data", *free, *arguments]
        server = subprocess.Popen(command, cwd=self.directory, env=self._environment(), stdin=subprocess.DEVNULL)
        self.servers.append(server)
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert server.poll() is None, f"the server exited with {server.returncode} instead of serving"
            holder = read_holder(self.directory / "veilmq-data")
            # The admin port is announced last.
            if holder is not None and holder.pid == server.pid and "admin" in holder.listeners:
                urls = {"9324": holder.listeners["sqs"], "9325": holder.listeners["admin"]}
                self.ports = {port: str(urlsplit(url).port) for port, url in urls.items()}
                return
            assert time.monotonic() < deadline, f"no port was announced after {START_SECONDS} s"
            time.sleep(0.02)

    def _finish(self, command: list[str], block: Block) -> str:
        done = subprocess.run(
            command, cwd=self.directory, env=self._environment(), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=BLOCK_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"README.md:{block.line} exited with {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def leave(self) -> list[int]:
        """End the servers and return their exit codes."""
        for server in self.servers:
            server.send_signal(signal.SIGTERM)
        codes = []
        for server in self.servers:
            try:
                codes.append(server.wait(STOP_SECONDS))
            except subprocess.TimeoutExpired:
                server.kill()
                codes.append(server.wait())
        self.servers.clear()
        return codes


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    someone = Reader(tmp_path)
    yield someone
    someone.leave()


def test_the_readme_runs(reader: Reader) -> None:
    page = blocks((ROOT / "README.md").read_text())
    assert [block.language for block in page].count("python") >= 1
    for block in page:
        printed = reader.run(block)
        if block.prints is not None:
            assert printed == block.prints, f"README.md:{block.line} prints something else than the README says"
    assert reader.servers, "the README starts no server"
    assert reader.leave() == [0]


def test_blocks_are_found_in_order_with_what_they_print() -> None:
    page = (
        "# A\n```bash\nmake run\n```\ntext\n```python\nprint(1)\n```\n"
        "prints\n```text\n1\n```\n```toml\na = 1\n```\n```text\n2\n```\n"
    )
    assert blocks(page) == [Block("bash", 3, "make run\n"), Block("python", 7, "print(1)\n", "1\n")]


@for_each(
    "block",
    [
        Block("bash", 1, "false\ntrue\n"),
        Block("bash", 1, "make no-such-target\n"),
        Block("python", 1, "raise SystemExit(3)\n"),
        Block("python", 1, "import warnings; warnings.warn('old', DeprecationWarning)\n"),
    ],
    ids=lambda block: block.text.splitlines()[0],
)
def test_a_block_that_fails_is_told(reader: Reader, block: Block) -> None:
    with pytest.raises(AssertionError, match=r"README.md:1 exited with"):
        reader.run(block)


def test_a_package_that_is_not_installed_is_told(reader: Reader) -> None:
    with pytest.raises(metadata.PackageNotFoundError):
        reader.run(Block("bash", 1, "pip install no-such-package-of-anyone\n"))
    assert reader.run(Block("bash", 1, "pip install boto3 # the AWS SDK\necho installed\n")) == "installed\n"


def test_a_port_stands_for_the_servers(reader: Reader) -> None:
    told = Block("bash", 1, "echo 9324 9325 93245\n")
    assert reader.run(told) == "9324 9325 93245\n", "there is no server yet"
    assert reader.run(Block("bash", 1, "make run\n")) == ""
    sqs, admin = reader.ports["9324"], reader.ports["9325"]
    assert {sqs, admin}.isdisjoint({"9324", "9325", "0"})
    assert reader.run(told) == f"{sqs} {admin} 93245\n"
