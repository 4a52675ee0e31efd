"""Azurite, the emulator of Azure Storage, in a process of its own (`make setup-clients` installs it)."""

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TOOLS = Path(__file__).parents[2] / ".tools"
_START_SECONDS = 60


@contextmanager
def azurite(service: str, kept: Path | None = None) -> Iterator[str]:
    """The URL of its `queue` or `blob` service, without an account. kept: a new directory for what it stores, which is
    whole when it has ended."""
    program = _TOOLS / "azurite" / "node_modules" / "azurite" / "dist" / "src" / service / "main.js"
    with tempfile.TemporaryDirectory() as directory:
        if kept is not None:
            kept.mkdir()
        command = [
            str(_TOOLS / "node" / "bin" / "node"), str(program), f"--{service}Host", "127.0.0.1",
            f"--{service}Port", "0", "--location", str(kept or directory), "--silent", "--skipApiVersionCheck",
            "--disableTelemetry",
        ]  # fmt: skip
        told = Path(directory) / "log"
        with told.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield _address(told, process)
        finally:
            process.kill() if kept is None else process.terminate()
            process.wait()


def _address(log: Path, process: subprocess.Popen[bytes]) -> str:
    """Where it says that it listens."""
    end = time.monotonic() + _START_SECONDS
    while (said := re.search(r"listens on (\S+)\n", log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)
    return said[1]
