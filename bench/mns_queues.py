"""The MNS protocol against SQS on one server, alternating: equal parts send, receive, delete, every request signed.

    make bench ARGS="--mns"        or alone: .venv/bin/python bench/mns_queues.py [--pairs 5] [--seconds 10] [--batch 1]

The measure is CPU per request: with parsing XML and checking HMAC-SHA1, a request may cost at most half as much again
as an SQS request. Both drive the same process, each run on a new queue. A forged request must get 403 before and after
each run.
"""

import argparse
import contextlib
import http.client
import os
import socket
import sys
from dataclasses import dataclass
from email.utils import formatdate

import install
import peers
import report
from measure import Load, MeasureFailed, Target, fdatasync, load_1min, refuse_memory, wrk_line
from peers import Place, Server, prepare, running
from scenarios import Lane, Result, Settings, by_turns
from sqs import Caller

CPU_GOAL = 1.5
PROTO = "mns"


class VeilMQ(peers.VeilMQ):
    """Ours, with a known port for MNS, too."""

    def __init__(self) -> None:
        super().__init__()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.mns_port: int = free.getsockname()[1]

    def command(self, place: Place) -> list[str]:
        command = super().command(place)
        command[command.index("--mns") + 1] = f"127.0.0.1:{self.mns_port}"
        return command


@dataclass(frozen=True)
class MnsTarget(Target):
    """`queue_url` is the queue's path."""

    def wrk_command(self, wrk: str, load: Load) -> tuple[list[str], dict[str, str]]:
        env = {
            **os.environ,
            "MNS_ID": self.key,
            "MNS_SECRET": self.secret,
            "QUEUE": self.queue_url,
            "NUM": str(load.batch),
            "BODY_BYTES": str(load.body_bytes),
            "MD5": "1",  # as the Python SDK sends it
        }
        return wrk_line(wrk, load, "mns_lifecycle.lua", f"http://{self.authority}/"), env


class BothServer(Server):
    """A server that is called over either protocol; queues are created and deleted over SQS."""

    @property
    def authority(self) -> str:
        assert isinstance(self.peer, VeilMQ)
        return f"127.0.0.1:{self.peer.mns_port}"

    def caller(self, proto: str) -> Caller:  # type: ignore[override]
        return super().caller("json")

    def target(self, proto: str, queue_url: str) -> Target:  # type: ignore[override]
        if proto != PROTO:
            return super().target("json", queue_url)
        path = f"/queues/{queue_url.rpartition('/')[2]}"
        return MnsTarget("json", self.authority, path, path, self.place.key, self.place.secret)


class MnsLane(Lane):
    def forgeries_let_in(self, queue_url: str) -> list[str]:
        server = self.server
        assert isinstance(server, BothServer)
        path = server.target(PROTO, queue_url).queue_url
        let_in = []
        for authorization in (f"MNS {server.place.key}:{'A' * 27}=", None):
            headers = {"Date": formatdate(usegmt=True), "x-mns-version": "2015-06-06"}
            if authorization is not None:
                headers["Authorization"] = authorization
            with contextlib.closing(http.client.HTTPConnection(server.authority, timeout=60)) as connection:
                connection.request("GET", f"{path}/messages?peekonly=true", headers=headers)
                answer = connection.getresponse()
                answer.read()
            # The document has 400 for a request without a signature.
            if answer.status != (400 if authorization is None else 403):
                let_in.append(f"a forged MNS request got {answer.status}")
        return let_in


def against_sqs(ours: peers.Peer, batches: list[int], connections: int, settings: Settings) -> Result:
    """One row per batch size."""
    rows = []
    with running(BothServer(ours, prepare(ours, "mns").place)) as server:
        for batch in batches:
            settings.say(f"MNS against SQS: {connections} connections, {batch} messages a request")
            left = MnsLane(server, PROTO, label=f"MNS, {batch} a request")  # type: ignore[arg-type]
            right = Lane(server, "json", label=f"SQS, {batch} a request")
            row = by_turns(left, right, Load(settings.seconds, connections, batch), settings)
            rows.append(row | {"goal": (None, CPU_GOAL if batch == 1 else None)})
    return {"batch": batches[0], "rows": rows}


def main() -> int:
    """Measure and write the report. 0 if the goal is met, 1 if not, 2 if a run was void or nothing could run."""
    parser = argparse.ArgumentParser(prog="bench/mns_queues.py", description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="messages a request, 1 to 10")
    options = parser.parse_args()
    peers.DATA.mkdir(exist_ok=True)
    try:
        refuse_memory(peers.DATA)
        wrk = install.wrk()
        ours = VeilMQ()
        ours.install()
        disk, load = fdatasync(peers.DATA), load_1min()
        settings = Settings(wrk, options.pairs, options.seconds, "json", say=lambda text: print(text, flush=True))
        result = against_sqs(ours, options.batch, 32, settings)
    except (install.Missing, peers.ServerGone, MeasureFailed, OSError) as error:
        print(f"bench/mns_queues.py: {error}", file=sys.stderr)
        return 2
    finally:
        peers.stop_all()
    quick = options.pairs < 5 or options.seconds < 10
    print("\n" + report.write("lifecycle", "mns", result, [ours], disk, load, quick))
    if not report.counted("lifecycle", result):
        return 2
    row = result["rows"][0]
    return 0 if row["goal"][1] is None or row["cpu_ratio"]["median"] <= row["goal"][1] else 1


if __name__ == "__main__":
    sys.exit(main())
