"""What keeps a new user from starting: each says what it is and what to type. (Missing extras, Java and old data have
their tests where they belong: tests/house/test_packaging.py, tests/pipeline, tests/store.)"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.ports import ANY

import veilmq
from veilmq.client.errors import advised
from veilmq.testing.for_each import for_each
from veilmq.testing.local import ServerProcess

READ_ONLY = """
set -eu
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
shift
exec "$@"
"""
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq%2FK1SZFPTOtr%2FKBHBeksoGMGw%3D%3D"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """With `environment` beside this one."""
    done = os.environ | environment
    return subprocess.run(command, env=done, capture_output=True, text=True, timeout=60)


def test_a_port_in_use_names_the_flag_and_who_to_ask(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = [f"--{name}=127.0.0.1:0" for name in ("sqs", "mns", "admin")]
        command = (sys.executable, "-m", "veilmq", "serve", "--data", str(tmp_path / "data"), *ports)
        done = run(*command, f"--azure=127.0.0.1:{port}")
    assert done.returncode == 4
    assert f"--azure 127.0.0.1:{port}: the port is in use" in done.stderr
    assert not (tmp_path / "data").exists(), "a refused start leaves nothing"
    assert "Choose another with --azure HOST:PORT (port 0: a free one), or see who has it: ss -ltnp" in done.stderr


def test_an_old_python_is_told_which_one_it_takes() -> None:
    script = "import sys; sys.version_info = (3, 10, 13, 'final', 0); import veilmq"
    done = run(sys.executable, "-c", script)
    assert done.returncode == 1
    told = "ImportError: VeilMQ needs Python 3.11 or later, and this is 3.10: python3.11 -m venv .venv"
    assert done.stderr.splitlines()[-1] == told


def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    server = ServerProcess(folder).start()
    assert server.stop() == 0
    own = [] if os.geteuid() == 0 else ["--map-root-user"]
    inside = [
        "unshare",
        "--mount",
        *own,
        "sh",
        "-c",
        READ_ONLY,
        "read-only",
        str(folder),
        sys.executable,
        "-m",
        "veilmq",
    ]
    mounted = f"{folder} is on a file system that is mounted read-only."
    cases = [
        (
            ["serve", *ANY, "--data", f"{folder}/other"],
            3,
            f"{folder}/other: Read-only file system",
            "Mount it for writing (after an error of the disk: see `dmesg`)",
        ),
        (
            ["serve", *ANY, "--data", f"{folder}/data"],
            3,
            f"{folder}/data/lock: Read-only file system",
            "Mount it for writing (after an error of the disk: see `dmesg`)",
        ),
        (["queues", "list", "--data", f"{folder}/data"], 3, "Read-only file system", "copy all of it elsewhere"),
        (["backup", f"{folder}/copy", "--data", f"{folder}/data"], 2, "Read-only file system", mounted),
        (["keys", "new", "--into", f"{folder}/keys.toml"], 2, "Read-only file system", mounted),
    ]
    for arguments, code, told, advice in cases:
        done = run(*inside, *arguments)
        assert done.returncode == code, (arguments, done.stderr)
        assert told in done.stderr
        assert advice in done.stderr


@pytest.fixture
def proxy() -> Iterator[str]:
    """What a company has: it answers for hosts that it does not reach, too."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            while True:
                try:
                    caller = listening.accept()[0]
                except OSError:
                    return
                with caller:
                    caller.recv(65_536)
                    caller.sendall(
                        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                    )

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
@for_each("protocol", ["sqs", "azure", "mns", "veil"])
def test_a_proxy_variable_does_not_swallow_this_machine(
    tmp_path: Path, proxy: str, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Not for our client; an SDK of its own needs NO_PROXY, which the page of errors says."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = ServerProcess(tmp_path).start()
    ports = {"sqs": server.sqs, "azure": server.azure, "mns": server.mns, "veil": server.sqs}
    place = ports[protocol].partition("://")[2]
    urls = {
        "sqs": f"sqs://id:secret@{place}/jobs?create=1&tls=0",
        "azure": f"azure://:{KEY}@{place}/devstoreaccount1/jobs?create=1&tls=0",
        "mns": f"mns://id:secret@{place}/jobs?create=1&tls=0",
        "veil": f"veil://{place}/jobs?create=1",
    }
    try:
        with veilmq.connect(urls[protocol]) as queue:
            queue.send("near")
            assert [message.body for message in queue.receive()] == ["near"]
    finally:
        assert server.stop() == 0


def test_a_proxy_that_is_asked_for_another_host_is_told() -> None:
    told = advised('Failed to connect to proxy URL: "http://proxy.example:3128/"')
    assert told.endswith("export NO_PROXY=HOST")
