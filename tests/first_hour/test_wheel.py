"""The wheel in an empty environment, up to the first message of boto3. The rest is `make first-hour`."""

import os
import subprocess
import sys
import time
from pathlib import Path

import boto3
import pytest
from tests.first_hour.wants import WANTS

import veilmq
from veilmq.testing.local import ServerProcess

ROOT = Path(__file__).parents[2]


def test_each_want_takes_at_most_two_commands() -> None:
    assert len({want.what for want in WANTS}) == 12
    assert [want.what for want in WANTS if not 1 <= len(want.commands) <= 2] == []


@pytest.mark.slow
def test_the_wheel_in_an_empty_environment_takes_a_first_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path / "dist"))
    (wheel,) = (tmp_path / "dist").iterdir()
    packages = str(tmp_path / "packages")
    locked = ("--require-hashes", "--only-binary", ":all:", "--requirement", "requirements/run.txt")
    run(sys.executable, "-m", "pip", "--quiet", "download", *locked, "--dest", packages)
    begun = time.perf_counter()
    run(sys.executable, "-m", "venv", str(tmp_path / "own"))
    pip = (str(tmp_path / "own" / "bin" / "pip"), "--quiet", "install", "--no-compile")
    run(*pip, "--no-index", "--find-links", packages, *locked)
    run(*pip, "--no-deps", str(wheel))
    program = str(tmp_path / "own" / "bin" / "veilmq")
    server = ServerProcess(tmp_path)
    server.program = (program,)
    server.start()
    try:
        place = {"endpoint_url": server.sqs, "region_name": "us-east-1"}
        sqs = boto3.client("sqs", aws_access_key_id="any", aws_secret_access_key="any", **place)
        url = sqs.create_queue(QueueName="orders")["QueueUrl"]
        sqs.send_message(QueueUrl=url, MessageBody="order 1")
        assert [each["Body"] for each in sqs.receive_message(QueueUrl=url)["Messages"]] == ["order 1"]
        took_s = time.perf_counter() - begun
    finally:
        assert server.stop() == 0
    with capsys.disabled():
        print(f"\nfirst message {took_s:.1f} s after the wheel and its packages were there")
    assert run(program, "--version").startswith(f"veilmq {veilmq.__version__}, ")
    assert str(tmp_path / "own") in run(program, "version")
    uvx = (str(Path(sys.executable).parent / "uvx"), "--no-cache", "--offline", "--no-index", "--find-links", packages)
    by_uv = run(*uvx, "--python", sys.executable, "--from", f"{wheel}[server]", "veilmq", "version")
    assert f" {veilmq.__version__} (state format " in by_uv
    assert str(tmp_path / "own") not in by_uv
    assert str(ROOT) not in by_uv
