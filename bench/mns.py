"""CPU a request of MNS against SQS on the same server: send, receive, delete in equal parts, every request signed.

    .venv/bin/python bench/mns.py [--pairs 5] [--seconds 5] [--num 1]

The two take turns on one server process, each with a queue of its own and 32 connections. Exit code 0 if the median
ratio is at most the goal of 1.5, 1 if not, 2 if a run was void.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import install
from measure import Load, MeasureFailed, Run, Target, _parse, cpu_us, rss_bytes, wrk_command
from peers import CREDENTIALS
from sqs import Caller

from veilmq.testing.server import ServerProcess

BENCH = Path(__file__).resolve().parent
GOAL = 1.5
KEY, SECRET = "AKIDBENCH", "a secret of the benchmark"
CONNECTIONS = 32


def run(server: ServerProcess, command: list[str], env: dict[str, str], load: Load) -> Run:
    """Drive the server with one command of wrk."""
    before = cpu_us(server.process.pid)
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=load.seconds + 60)
    spent = cpu_us(server.process.pid) - before
    measured = _parse(done.stdout + done.stderr, load, spent, rss_bytes(server.process.pid))
    if measured.void:
        raise MeasureFailed(measured.void)
    return measured


def turns(server: ServerProcess, wrk: str, load: Load, pairs: int) -> list[float]:
    """The ratio of each pair of runs."""
    sqs, mns = (url.removeprefix("http://") for url in (server.sqs, server.mns))
    caller = Caller(int(sqs.rpartition(":")[2]), KEY, SECRET, "json")
    urls = {name: caller.create_queue(name) for name in ("bench-sqs", "bench-mns")}
    target = Target("json", sqs, "/", urls["bench-sqs"], KEY, SECRET)
    flags = ["-t1", f"-c{load.connections}", f"-d{load.seconds}s", "--timeout", "10s"]
    mns_command = [wrk, *flags, "-s", str(BENCH / "mns_lifecycle.lua"), f"http://{mns}/"]
    mns_env = os.environ | {
        "MNS_ID": KEY,
        "MNS_SECRET": SECRET,
        "QUEUE": "/queues/bench-mns",
        "NUM": str(load.batch),
        "MD5": "1",
    }
    sqs_command, sqs_env = wrk_command(wrk, target, load)
    ratios = []
    for pair in range(pairs):
        first = run(server, sqs_command, sqs_env, load)
        second = run(server, mns_command, mns_env, load)
        ratios.append(second.cpu_us_per_request / first.cpu_us_per_request)
        print(
            f"pair {pair + 1}: SQS {first.cpu_us_per_request:.1f} us, {first.rps:.0f}/s; "
            f"MNS {second.cpu_us_per_request:.1f} us, {second.rps:.0f}/s; ratio {ratios[-1]:.2f}",
            flush=True,
        )
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/mns.py", description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--num", type=int, default=1, help="messages a request, 1 to 10")
    options = parser.parse_args()
    wrk = install.wrk()
    with tempfile.TemporaryDirectory(prefix="veilmq-bench-") as directory:
        credentials = Path(directory) / "credentials.toml"
        with open(os.open(credentials, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write(CREDENTIALS.format(key=KEY, secret=SECRET))
        server = ServerProcess(Path(directory), "--credentials", str(credentials)).start()
        try:
            ratios = turns(server, wrk, Load(options.seconds, CONNECTIONS, options.num), options.pairs)
        except MeasureFailed as error:
            print(f"void: {error}", file=sys.stderr)
            return 2
        finally:
            server.stop()
    ratio = statistics.median(ratios)
    print(f"CPU a request, MNS to SQS: {ratio:.2f} (goal: at most {GOAL})")
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
