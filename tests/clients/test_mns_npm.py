"""The JavaScript SDKs of MNS, unmodified: Alibaba's own, and two of the community, one through a proxy setting.

Strategy: a program for each SDK asserts what it gets; it runs against a development server and one that checks keys.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from veilmq.testing.local import ServerProcess

ROOT = Path(__file__).parents[2]
NODE = ROOT / ".tools" / "node" / "bin" / "node"
PACKAGES = ROOT / ".tools" / "clients" / "node_modules"
PROGRAMS = Path(__file__).parent / "js"

pytestmark = pytest.mark.slow


def run(program: str, *arguments: str, **environment: str) -> None:
    """Run a program that must say `done`."""
    for path in (NODE, PACKAGES):
        if not path.exists():
            pytest.fail(f"{path} is missing: run `make setup-clients`", pytrace=False)
    # No proxy of this machine, and no answer but the server's.
    inherited = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run(
        [NODE, "--no-deprecation", PROGRAMS / program, *arguments],
        env=inherited | {"NODE_PATH": str(PACKAGES)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.fixture(params=["development", "checked"])
def server(request: pytest.FixtureRequest, start: Any, credentials: Path) -> ServerProcess:
    made: ServerProcess = start() if request.param == "development" else start("--credentials", str(credentials))
    return made


def test_alicloud_mns(server: ServerProcess, key: tuple[str, str], request: pytest.FixtureRequest) -> None:
    run("alicloud_mns.cjs", server.mns, *key, request.node.callspec.params["server"])


def test_ali_mns_through_the_proxy_setting(server: ServerProcess, key: tuple[str, str]) -> None:
    run("ali_mns.cjs", *key, http_proxy=server.mns)


def test_aliyun_mns(server: ServerProcess, key: tuple[str, str], request: pytest.FixtureRequest) -> None:
    run("aliyun_mns.cjs", server.mns, *key, request.node.callspec.params["server"])
