"""A server whose clients have taken all files that it may open takes connections again when it can."""

import resource
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.cli.conftest import WAIT_S, Serve


@pytest.mark.parametrize("loop", ["uvloop", pytest.param("asyncio", marks=pytest.mark.slow)])
def test_connections_are_accepted_again(serve: Serve, tmp_path: Path, loop: str) -> None:
    hidden: dict[str, str] = {}
    if loop == "asyncio":
        (tmp_path / "hiding").mkdir()
        (tmp_path / "hiding" / "uvloop.py").write_text("raise ImportError")
        hidden = {"PYTHONPATH": str(tmp_path / "hiding")}
    server = serve("--connections-max", "1000000000", **hidden).ready()
    assert "files may be open, and three ports with --connections-max 1000000000 need 3000002000" in server.told()
    place = urlsplit(server.url).netloc
    before = HTTPConnection(place, timeout=WAIT_S)
    assert ask(before) == 404
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (0, limits[1]))
    refused = [HTTPConnection(place, timeout=WAIT_S) for _ in range(5)]
    for each in refused:
        each.connect()  # the kernel does that
    assert ask(before) == 404
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, limits)
    after = HTTPConnection(place, timeout=WAIT_S)
    assert ask(after) == 404
    for each in (before, after, *refused):
        each.close()
    assert server.stop() == 0


def ask(connection: HTTPConnection) -> int:
    connection.request("GET", "/")
    answer = connection.getresponse()
    answer.read()
    return answer.status
