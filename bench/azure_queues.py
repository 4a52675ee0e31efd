"""The Azure protocol: our server against azurite, alternating, with short and with deep queues.

Both serve the same account and are driven by azure_lifecycle.lua with an account SAS, which both check: a request with
a changed signature must get 403 before and after each run. The same script fills the queue: it puts without getting if
its first get is due only after millions of puts.
"""

import base64
import contextlib
import dataclasses
import hashlib
import hmac
import http.client
import os
import re
import secrets
from urllib.parse import quote

import install
import peers
from measure import Load, MeasureFailed, Target, measured_run, wrk_line
from peers import Peer, Place, Server, prepare, running
from scenarios import DEPTH_GOAL, DEPTH_RSS_MIB_MAX, Lane, Result, Settings, by_turns
from sqs import CallFailed

ACCOUNT = "benchaccount"
VERSION = "2025-11-05"
SHALLOW_GOAL, DEEP_GOAL = 5.0, 500.0
OUR_DEEP, OUR_SHALLOW = 100_000, 100
PUTS_ONLY = 1_000_000_000
NODE_MIN = 22  # required by azurite's package
CALL_SECONDS = 60

CREDENTIALS = """\
[[account]]
id = "111111111111"
azure_name = "{account}"
azure_keys = ["{key}", "{key}"]
"""


class VeilMQ(peers.VeilMQ):
    """Our server, with the Azure port where callers expect it."""

    def command(self, place: Place) -> list[str]:
        credentials = place.directory / "credentials.toml"
        if not credentials.exists():
            with open(os.open(credentials, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.write(CREDENTIALS.format(account=ACCOUNT, key=place.secret))
        return [
            str(self.program), "serve", "--data", str(place.directory / "data"),
            "--azure", f"127.0.0.1:{place.port}", "--admin", f"127.0.0.1:{place.admin_port}",
            "--sqs", "127.0.0.1:0", "--mns", "127.0.0.1:0", "--credentials", str(credentials),
        ]  # fmt: skip


class Azurite(Peer):
    name = "azurite"
    version = "3.37.0"
    promise = "in memory, written to a file every 5 s; checks signatures"
    checks_signatures = True

    def install(self) -> None:
        self.package = install.npm_package("azurite", self.version)
        self.node = install.node(NODE_MIN)

    def command(self, place: Place) -> list[str]:
        return [
            self.node, str(self.package / "dist" / "src" / "queue" / "main.js"),
            "--queueHost", "127.0.0.1", "--queuePort", str(place.port), "--location", str(place.directory),
            "--silent", "--skipApiVersionCheck", "--disableTelemetry",
        ]  # fmt: skip

    def environment(self, place: Place) -> dict[str, str]:
        return {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{place.secret}"}

    def runtime(self) -> str:
        return f"node {install.output_of([self.node, '--version']).strip()}"


def account_sas(key: str) -> str:
    """A query string with all rights on queues until 2100 ("Create an account SAS")."""
    given = {"sv": VERSION, "ss": "q", "srt": "sco", "sp": "rwdlacup", "se": "2100-01-01T00:00:00Z"}
    fields = (ACCOUNT, given["sp"], given["ss"], given["srt"], "", given["se"], "", "", given["sv"], "")
    text = "\n".join(fields) + "\n"
    signature = hmac.digest(base64.b64decode(key), text.encode(), hashlib.sha256)
    given["sig"] = base64.b64encode(signature).decode()
    return "&".join(f"{name}={quote(value, safe='')}" for name, value in given.items())


class Caller:
    """Single calls, as in `sqs.Caller`. A queue's URL is its path."""

    def __init__(self, port: int, key: str) -> None:
        self.authority = f"127.0.0.1:{port}"
        self.sas = account_sas(key)

    def call(self, method: str, target: str, body: bytes = b"") -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.authority, timeout=CALL_SECONDS)
        with contextlib.closing(connection):
            joint = "&" if "?" in target else "?"
            connection.request(method, f"{target}{joint}{self.sas}", body, {"x-ms-version": VERSION})
            answer = connection.getresponse()
            text = answer.read()
        if answer.status >= 300:
            raise CallFailed(method, answer.status, text.decode(errors="replace"))
        return answer

    def create_queue(self, name: str) -> str:
        path = f"/{ACCOUNT}/{name}"
        self.call("PUT", path)
        return path

    def put(self, path: str) -> None:
        text = b"x" * 200
        self.call("POST", f"{path}/messages", b"<QueueMessage><MessageText>%s</MessageText></QueueMessage>" % text)

    def count(self, path: str) -> int:
        return int(self.call("GET", f"{path}?comp=metadata").headers["x-ms-approximate-messages-count"])

    def forgeries_let_in(self, path: str) -> list[str]:
        """A SAS with another signature, and none at all, must be refused with 403 (or 401)."""
        let_in = []
        genuine = self.sas
        for forged in (re.sub("sig=.*", f"sig={quote(base64.b64encode(bytes(32)).decode(), safe='')}", genuine), ""):
            self.sas = forged
            try:
                self.call("GET", f"{path}/messages?peekonly=true")
                let_in.append("a forged request was let in")
            except CallFailed as refused:
                if refused.status not in {401, 403}:
                    let_in.append(f"a forged request got {refused.status}")
            finally:
                self.sas = genuine
        return let_in


@dataclasses.dataclass(frozen=True)
class AzureTarget(Target):
    """`secret` is the SAS."""

    def wrk_command(self, wrk: str, load: Load) -> tuple[list[str], dict[str, str]]:
        env = {
            **os.environ,
            "SAS": self.secret,
            "QUEUE": self.queue_url,
            "NUM": str(PUTS_ONLY if load.only_send else load.batch),
            "API_VERSION": VERSION,
            "BODY_BYTES": str(load.body_bytes),
        }
        return wrk_line(wrk, load, "azure_lifecycle.lua", f"http://{self.authority}/"), env


class AzureServer(Server):
    """A server that is called over the Azure protocol."""

    def caller(self, proto: str = "azure") -> Caller:  # type: ignore[override]
        return Caller(self.place.port, self.place.secret)

    def target(self, proto: str, queue_url: str) -> AzureTarget:
        caller = self.caller()
        return AzureTarget("azure", caller.authority, queue_url, queue_url, ACCOUNT, caller.sas)

    def drop_queue(self, proto: str, queue_url: str) -> None:
        self.caller().call("DELETE", queue_url)


class AzureLane(Lane):
    def forgeries_let_in(self, queue_url: str) -> list[str]:
        return self.server.caller("azure").forgeries_let_in(queue_url)


def started(peer: Peer, run: str) -> contextlib.AbstractContextManager[AzureServer]:
    place = prepare(peer, run).place
    key = base64.b64encode(secrets.token_bytes(64)).decode()
    return running(AzureServer(peer, dataclasses.replace(place, secret=key)))


def _lane(server: AzureServer, count: int, settings: Settings) -> AzureLane:
    """A queue with at least `count` messages."""
    path = server.new_queue("azure")
    lane = AzureLane(server, "azure", path, f"{server.peer.name} {count:,}")
    caller, done, rate = server.caller(), 0, 0.0
    while count - done > max(2_000.0, rate):
        seconds = 1 if not rate else max(1, min(10, int((count - done) / rate)))
        load = Load(seconds, 32, 1, only_send=True)
        run = measured_run(settings.wrk, server.pid, server.target("azure", path), load)
        if run.void:
            raise MeasureFailed(f"{lane.name}: filling the queue: {run.void}")
        done, rate = done + run.requests, run.requests / run.seconds
    for _ in range(count - done):
        caller.put(path)
    settings.say(f"{lane.name}: {max(done, count):,} messages acknowledged, {caller.count(path):,} counted")
    return lane


def against(ours: Peer, azurite: Peer, deep: int, connections: int, settings: Settings) -> Result:
    """Ours against azurite: a new queue for each run, then queues of `deep` messages."""
    load = Load(settings.seconds, connections, 1)
    rows = []
    with started(ours, "ours") as left, started(azurite, "peer") as right:
        settings.say(f"{ours.name} against {azurite.name}: {connections} connections")
        row = by_turns(AzureLane(left, "azure"), AzureLane(right, "azure"), load, settings)
        rows.append(row | {"goal": (SHALLOW_GOAL, None)})
    with started(ours, "ours") as left, started(azurite, "peer") as right:
        settings.say(f"{ours.name} against {azurite.name}: {deep:,} messages deep")
        row = by_turns(_lane(left, deep, settings), _lane(right, deep, settings), load, settings)
        rows.append(row | {"goal": (DEEP_GOAL, None)})
    return {"batch": 1, "rows": rows}


def depth(ours: Peer, connections: int, settings: Settings) -> Result:
    """Ours against itself: one server with a deep queue, one with a shallow queue."""
    with started(ours, "deep") as left, started(ours, "shallow") as right:
        deep, shallow = _lane(left, OUR_DEEP, settings), _lane(right, OUR_SHALLOW, settings)
        row = by_turns(deep, shallow, Load(settings.seconds, connections, 1), settings)
    row |= {"deep": OUR_DEEP, "shallow": OUR_SHALLOW, "ratio_goal": DEPTH_GOAL, "rss_mib_goal": DEPTH_RSS_MIB_MAX}
    return {"rows": [row]}
