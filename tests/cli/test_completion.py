"""What the shell completes: commands, and the names of queues of the server or directory that the words mean."""

import socket
import subprocess
import time
from pathlib import Path

import pytest
from tests.cli.conftest import WAIT_S, Serve
from tests.support.commands import bare

import veilmq
from veilmq.testing.local import VEILMQ


def completed(words: str, **environment: str) -> list[str]:
    """What bash is given for the last of the words; nothing may go to the terminal."""
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1), "_VEILMQ_COMPLETE": "complete_bash"}
    done = subprocess.run(VEILMQ, capture_output=True, text=True, timeout=WAIT_S, env=bare(**asked, **environment))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("orders", "others", "failed"):
        veilmq.connect(f"veil://{tmp_path}/data?queue={name}&create=1").close()
    return tmp_path / "data"


def test_names_of_a_directory_that_nobody_serves(data: Path) -> None:
    assert completed("veilmq que") == ["queues"]
    assert completed(f"veilmq send --data {data} o") == ["orders", "others"]
    assert completed("veilmq queues set ord", VEILMQ_DATA=str(data)) == ["orders"]
    assert completed("veilmq queues set orders --dead-letters f", VEILMQ_DATA=str(data)) == ["failed"]
    assert completed("veilmq moves start failed --to ", VEILMQ_DATA=str(data)) == ["orders", "others", "failed"]
    assert completed(f"veilmq send --region eu-west-1 --data {data} o") == []


def test_names_of_a_server(serve: Serve, data: Path) -> None:
    server = serve(data=data).ready()
    assert completed(f"veilmq peek --data {data} o") == ["orders", "others"]
    where = f"--admin {server.admin} --token-file {data}/admin-token"
    assert completed(f"veilmq peek {where} or") == ["orders"]
    assert server.stop() == 0


def test_what_goes_wrong_says_nothing_and_takes_no_time(tmp_path: Path) -> None:
    assert completed(f"veilmq peek --data {tmp_path}/none o") == []
    assert completed("veilmq peek --admin 127.0.0.1:1 o") == []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        assert completed(f"veilmq peek --admin 127.0.0.1:{silent.getsockname()[1]} o") == []
        assert time.monotonic() - begun < 9  # a command waits 20 s for an answer
