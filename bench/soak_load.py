"""The load of the soak: rounds of requests over the three protocols, each kind at its own rate, every request signed.

Strategy: a `Lane` is a thread with a connection to each port that repeats one kind of round at its rate; it is behind
for a while if the server is slow, but never catches up by more than a second. Each answer has an expected status;
anything else is counted and shown, because a soak whose requests fail measures nothing. The rounds take out more than
they put in, so that no queue grows by the load alone. What should be bounded changes
all the time: names of queues, topics, clients, groups and deduplication ids are new in each round.
"""

import base64
import contextlib
import hashlib
import hmac
import http.client
import itertools
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any
from urllib.parse import quote, urlsplit

import azure_queues
import sqs

XML = '<?xml version="1.0"?>'
ACCOUNT, KEY, SECRET = "111111111111", "AKSOAK", "soak-secret-0123456789abcdef0123456789"
AZURE_NAME, AZURE_KEY = azure_queues.ACCOUNT, base64.b64encode(bytes(range(64))).decode()
CREDENTIALS = f"""\
[[account]]
id = "{ACCOUNT}"
azure_name = "{AZURE_NAME}"
azure_keys = ["{AZURE_KEY}", "{AZURE_KEY}"]
[[account.key]]
id = "{KEY}"
secret = "{SECRET}"
[[account.key]]
id = "AKFEW"
secret = "{SECRET}"
grants = [{{ actions = ["list-queues"] }}]
"""
_NUMBERS = itertools.count(1)


def fresh(prefix: str) -> str:
    """A name that was never used before."""
    return f"{prefix}-{next(_NUMBERS)}"


@dataclass
class Counted:
    """Answers of all lanes."""

    answers: Counter[str] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, protocol: str, what: str, status: int, expected: tuple[int, ...], text: bytes) -> None:
        with self.lock:
            self.answers[protocol] += 1
            if status not in expected:
                self.unexpected[f"{protocol} {what}: {status} {text[:160].decode(errors='replace')}"] += 1

    def failed(self, lane: str, error: BaseException) -> None:
        with self.lock:
            self.unexpected[f"{lane}: {type(error).__name__}: {error}"] += 1


class Port:
    """One kept connection to one port; reopened when the server ended it while it was idle."""

    def __init__(self, url: str, protocol: str, counted: Counted) -> None:
        self.netloc, self.protocol, self.counted = urlsplit(url).netloc, protocol, counted
        self._connection = http.client.HTTPConnection(self.netloc, timeout=60)
        self._used = 0.0

    def ask(
        self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None,
        expected: tuple[int, ...] = (200, 201, 202, 204), what: str = "",
    ) -> bytes:  # fmt: skip
        if time.monotonic() - self._used > 30:
            self._connection.close()
        self._used = time.monotonic()
        try:
            self._connection.request(method, target, body, headers or {})
            answer = self._connection.getresponse()
            text = answer.read()
        except BaseException:
            self._connection.close()
            raise
        self.counted.add(self.protocol, what or f"{method} {target.partition('?')[0]}", answer.status, expected, text)
        return text

    def close(self) -> None:
        self._connection.close()


@dataclass
class Ports:
    """Signed requests of one lane over the three protocols, and to the admin port."""

    urls: dict[str, str]
    token: str
    counted: Counted
    agent: str = "soak/1"

    def __post_init__(self) -> None:
        self._ports = {name: Port(url, name, self.counted) for name, url in self.urls.items()}
        self._caller = sqs.Caller(urlsplit(self.urls["sqs"]).port or 0, KEY, SECRET, "json")
        self._sas = azure_queues.account_sas(AZURE_KEY)

    def close(self) -> None:
        for port in self._ports.values():
            port.close()

    def sqs(self, action: str, forge: str = "", expected: tuple[int, ...] = (200,), **given: object) -> dict[str, Any]:
        headers, body = self._caller.request(action, given, "/", forge)
        headers["user-agent"] = self.agent
        text = self._ports["sqs"].ask("POST", "/", body, headers, expected, action)
        found: dict[str, Any] = json.loads(text) if text else {}
        return found

    def queue(self, name: str, **attributes: str) -> str:
        return str(self.sqs("CreateQueue", QueueName=name, Attributes=attributes)["QueueUrl"])

    def azure(self, method: str, path: str, body: str = "", expected: tuple[int, ...] = (200, 201, 202, 204)) -> str:
        joint = "&" if "?" in path else "?"
        headers = {"x-ms-version": azure_queues.VERSION, "user-agent": self.agent}
        target = f"/{AZURE_NAME}/{path}{joint}{self._sas}"
        return self._ports["azure"].ask(method, target, body.encode(), headers, expected).decode()

    def mns(
        self, method: str, target: str, body: str = "", expected: tuple[int, ...] = (200, 201, 204), key: str = KEY
    ) -> str:
        kind, date = "text/xml" if body else "", formatdate(usegmt=True)
        text = f"{method}\n\n{kind}\n{date}\nx-mns-version:2015-06-06\n{target}"
        signature = base64.b64encode(hmac.digest(SECRET.encode(), text.encode(), hashlib.sha1)).decode()
        headers = {
            "Date": date, "x-mns-version": "2015-06-06", "Authorization": f"MNS {key}:{signature}",
            "User-Agent": self.agent,
        }  # fmt: skip
        if kind:
            headers["Content-Type"] = kind
        return self._ports["mns"].ask(method, target, body.encode(), headers, expected).decode()

    def admin(self, target: str, expected: tuple[int, ...] = (200,), method: str = "GET", token: str = "") -> bytes:
        headers = {"Authorization": f"Bearer {token or self.token}"}
        return self._ports["admin"].ask(method, target, b"", headers, expected)

    def raw(self, name: str) -> socket.socket:
        """A connection of its own to that port."""
        url = urlsplit(self.urls[name])
        return socket.create_connection((url.hostname or "", url.port or 0), timeout=30)


def one(pattern: str, text: str) -> str:
    """The first group of the pattern's only match. Raises ValueError."""
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in {text[:200]}")
    return found[1]


class Stage:
    """The queues and topics that stay, and the rounds. Each round takes the lane's ports and its number."""

    def __init__(self, ports: Ports, endpoint: str) -> None:
        """endpoint: an HTTP endpoint that takes pushes."""
        self._following = 0
        """The next event that the observer reads."""
        self.dead = ports.queue("dead")
        arn = ports.sqs("GetQueueAttributes", QueueUrl=self.dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        self.dead_arn = arn
        policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": "3"})
        self.orders = ports.queue("orders", RedrivePolicy=policy, VisibilityTimeout="5")
        self.fifo = ports.queue("orders.fifo", FifoQueue="true", VisibilityTimeout="30")
        self.empty = ports.queue("empty")
        self.copies = [ports.queue(f"copies-{place}") for place in range(3)]
        ports.azure("PUT", "orders-azure")
        ports.mns("PUT", "/queues/orders-mns", f"{XML}<Queue/>")
        ports.mns("PUT", "/topics/news", f"{XML}<Topic/>")
        for place in range(3):
            self.subscribe(ports, "news", f"s{place}", f"acs:mns:us-east-1:{ACCOUNT}:queues/copies-{place}")
        self.subscribe(ports, "news", "pushed", endpoint)

    def subscribe(self, ports: Ports, topic: str, name: str, endpoint: str) -> None:
        body = f"{XML}<Subscription><Endpoint>{endpoint}</Endpoint></Subscription>"
        ports.mns("PUT", f"/topics/{topic}/subscriptions/{name}", body)

    def sqs_life(self, ports: Ports, number: int) -> None:
        """Sent, received, deleted; of 20 receives one is given up, so its message comes again, and at last dies."""
        body = "x" * (60_000 if number % 50 == 0 else 200)
        ports.sqs("SendMessage", QueueUrl=self.orders, MessageBody=body)
        for message in ports.sqs("ReceiveMessage", QueueUrl=self.orders, MaxNumberOfMessages=2).get("Messages", []):
            handle = message["ReceiptHandle"]
            if number % 20 == 1:
                continue
            if number % 20 == 2:
                ports.sqs("ChangeMessageVisibility", QueueUrl=self.orders, ReceiptHandle=handle, VisibilityTimeout=9)
            ports.sqs("DeleteMessage", QueueUrl=self.orders, ReceiptHandle=handle)

    def fifo_life(self, ports: Ports, number: int) -> None:
        """Each message has a new group and a new deduplication id."""
        group = fresh("group")
        ports.sqs(
            "SendMessage", QueueUrl=self.fifo, MessageBody="y" * 200, MessageGroupId=group, MessageDeduplicationId=group
        )
        given = {"QueueUrl": self.fifo, "MaxNumberOfMessages": 2, "ReceiveRequestAttemptId": group}
        for message in ports.sqs("ReceiveMessage", **given).get("Messages", []):
            ports.sqs("DeleteMessage", QueueUrl=self.fifo, ReceiptHandle=message["ReceiptHandle"])

    def azure_life(self, ports: Ports, number: int) -> None:
        message = f"<QueueMessage><MessageText>{'z' * 200}</MessageText></QueueMessage>"
        ports.azure("POST", "orders-azure/messages", message)
        got = ports.azure("GET", "orders-azure/messages?visibilitytimeout=60&numofmessages=2")
        for name, receipt in re.findall("<MessageId>([^<]+).*?<PopReceipt>([^<]+)", got):
            place = f"orders-azure/messages/{name}?popreceipt={quote(receipt, '')}"
            if number % 10 == 1:  # given back at once
                ports.azure("PUT", f"{place}&visibilitytimeout=0")
            else:
                ports.azure("DELETE", place)

    def mns_life(self, ports: Ports, number: int) -> None:
        message = f"{XML}<Message><MessageBody>{'w' * 200}</MessageBody></Message>"
        ports.mns("POST", "/queues/orders-mns/messages", message)
        got = ports.mns("GET", "/queues/orders-mns/messages?waitseconds=1")
        handle = one("<ReceiptHandle>([^<]+)", got)
        ports.mns("DELETE", f"/queues/orders-mns/messages?ReceiptHandle={handle}")

    def publish(self, ports: Ports, number: int) -> None:
        """To three queues, which are emptied, and an endpoint."""
        ports.mns("POST", "/topics/news/messages", f"{XML}<Message><MessageBody>news</MessageBody></Message>")
        for url in self.copies:
            found = ports.sqs("ReceiveMessage", QueueUrl=url, MaxNumberOfMessages=10).get("Messages", [])
            entries = [{"Id": str(n), "ReceiptHandle": each["ReceiptHandle"]} for n, each in enumerate(found)]
            if entries:
                ports.sqs("DeleteMessageBatch", QueueUrl=url, Entries=entries)

    def queue_churn(self, ports: Ports, number: int) -> None:
        """A queue that lives for a moment, by each protocol in turn, deleted with messages in it."""
        name = fresh("churn")
        if number % 3 == 0:
            url = ports.queue(name)
            ports.sqs("TagQueue", QueueUrl=url, Tags={fresh("tag"): "1"})
            ports.sqs("SendMessage", QueueUrl=url, MessageBody="1")
            ports.sqs("ReceiveMessage", QueueUrl=url)
            ports.sqs("PurgeQueue", QueueUrl=url)
            ports.sqs("SendMessage", QueueUrl=url, MessageBody="2")
            ports.sqs("DeleteQueue", QueueUrl=url)
        elif number % 3 == 1:
            ports.azure("PUT", name)
            message = "<QueueMessage><MessageText>1</MessageText></QueueMessage>"
            ports.azure("POST", f"{name}/messages?messagettl=60", message)
            ports.azure("DELETE", name)
        else:
            ports.mns("PUT", f"/queues/{name}", f"{XML}<Queue/>")
            ports.mns("POST", f"/queues/{name}/messages", f"{XML}<Message><MessageBody>1</MessageBody></Message>")
            ports.mns("DELETE", f"/queues/{name}")

    def topic_churn(self, ports: Ports, number: int) -> None:
        """A topic whose endpoint refuses connections, published to and deleted while its pushes are retried."""
        name = fresh("topic")
        ports.mns("PUT", f"/topics/{name}", f"{XML}<Topic/>")
        self.subscribe(ports, name, "dead", "http://127.0.0.1:9/")
        self.subscribe(ports, name, "queue", f"acs:mns:us-east-1:{ACCOUNT}:queues/copies-0")
        ports.mns("POST", f"/topics/{name}/messages", f"{XML}<Message><MessageBody>1</MessageBody></Message>")
        ports.mns("DELETE", f"/topics/{name}/subscriptions/dead")
        ports.mns("DELETE", f"/topics/{name}")

    def connection_churn(self, ports: Ports, number: int) -> None:
        """A client with a new name; or a connection that asks for nothing, half a request, or no HTTP."""
        if number % 2:
            newcomer = Ports(ports.urls, ports.token, ports.counted, fresh("client"))
            newcomer.sqs("SendMessage", QueueUrl=self.copies[0], MessageBody="from a new client")
            newcomer.close()
            return
        with ports.raw(("sqs", "azure", "mns", "admin")[number // 2 % 4]) as raw, contextlib.suppress(OSError):
            raw.sendall((b"", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Le", b"\x16\x03\x01 no HTTP\r\n\r\n")[number % 3])
            if number % 3 == 2:
                raw.recv(1_000)

    def refusals(self, ports: Ports, number: int) -> None:
        """Requests that are refused, each for another reason."""
        missing = f"{self.empty}-missing"
        match number % 8:
            case 0:
                ports.sqs("SendMessage", QueueUrl=missing, MessageBody="1", expected=(400,))
            case 1:
                ports.sqs("SendMessage", "signature", QueueUrl=self.orders, MessageBody="1", expected=(403,))
            case 2:
                ports.sqs("SendMessage", "key", QueueUrl=self.orders, MessageBody="1", expected=(403,))
            case 3:
                ports.sqs("DeleteMessage", QueueUrl=self.orders, ReceiptHandle=fresh("none"), expected=(400, 404))
            case 4:
                ports.azure("GET", f"{fresh('missing')}/messages", expected=(404,))
            case 5:
                ports.mns("GET", f"/queues/{fresh('missing')}/messages", expected=(404,))
            case 6:
                ports.mns("GET", "/queues", key=fresh("AKNONE"), expected=(403, 404))
            case _:
                ports.admin("/api/v1/queues", token=fresh("wrong"), expected=(401, 403))

    def names(self, ports: Ports, number: int) -> None:
        """Queues that are not there, each under a name of its own: a server remembers names and signatures, 4,096 of
        SQS and 1,024 shared access signatures of Azure. Churn alone would fill these in 100 and in 70 minutes."""
        ports.sqs("SendMessage", QueueUrl=f"{self.empty}-{fresh('missing')}", MessageBody="1", expected=(400,))
        if number % 3 == 0:
            ports.azure("GET", f"{fresh('missing')}/messages", expected=(404,))

    def poll(self, ports: Ports, number: int) -> None:
        """A long poll that ends empty; every third client hangs up meanwhile."""
        if number % 3:
            ports.sqs("ReceiveMessage", QueueUrl=self.empty, WaitTimeSeconds=1 + number % 3)
            return
        caller = sqs.Caller(urlsplit(ports.urls["sqs"]).port or 0, KEY, SECRET, "json")
        with ports.raw("sqs") as raw:
            raw.sendall(caller.wire("ReceiveMessage", {"QueueUrl": self.empty, "WaitTimeSeconds": 10}))
            time.sleep(1)

    def dead_letters(self, ports: Ports, number: int) -> None:
        """Move dead letters back, or delete some."""
        if number % 5 == 0:
            ports.sqs("StartMessageMoveTask", SourceArn=self.dead_arn, expected=(200, 400))
            return
        found = ports.sqs("ReceiveMessage", QueueUrl=self.dead, MaxNumberOfMessages=10).get("Messages", [])
        for each in found:
            ports.sqs("DeleteMessage", QueueUrl=self.dead, ReceiptHandle=each["ReceiptHandle"])

    def observe(self, ports: Ports, number: int) -> None:
        """What a monitoring and an operator ask for."""
        ports.admin(("/metrics", "/health/ready", "/api/v1/queues?limit=100", "/api/v1/topics?limit=100")[number % 4])
        if number % 3 == 0:
            self._follow(ports)

    def _follow(self, ports: Ports) -> None:
        """Read on in the history. It may be trimmed before it was read: the answer must say so (410, `history_trimmed`)
        and name a first offset beyond the one that was asked for. An answer that trimming cut off ends early, and the
        same request again, from the last whole line on, must be answered like that. Raises ValueError else."""
        cut: http.client.IncompleteRead | None = None
        try:
            text = ports.admin(f"/api/v1/events?from={self._following}&limit=2000", expected=(200, 410))
        except http.client.IncompleteRead as error:
            cut, text = error, error.partial.rpartition(b"\n")[0]
        lines = [json.loads(line) for line in text.splitlines()]
        if lines and "offset" in lines[-1]:
            self._following = int(lines[-1]["offset"]) + 1
        if cut is not None:
            text = ports.admin(f"/api/v1/events?from={self._following}&limit=1", expected=(410,))
            lines = [json.loads(text)]
        if lines and "offset" not in lines[-1]:
            refused = lines[-1]
            if refused.get("error") != "history_trimmed" or refused["first_offset"] <= self._following:
                raise ValueError(f"from {self._following}: {text[:200].decode()}")
            self._following = refused["first_offset"]


RATES = {
    "sqs_life": 13.0, "fifo_life": 9.0, "azure_life": 13.0, "mns_life": 13.0, "publish": 2.0, "queue_churn": 2.0,
    "topic_churn": 0.5, "connection_churn": 6.0, "refusals": 8.0, "names": 5.0, "poll": 4.0, "dead_letters": 0.3,
    "observe": 1.0,
}  # fmt: skip
"""Rounds a second; about 200 requests a second in all."""
POLLERS = 8


class Lane(threading.Thread):
    """Repeats a round at its rate until `stop` is set."""

    def __init__(
        self, act: Callable[[Ports, int], None], rate: float, ports: Ports, stop: threading.Event, first: int = 0
    ) -> None:
        super().__init__(name=act.__name__, daemon=True)
        self._act, self._rate, self._ports, self._stop_set, self._first = act, rate, ports, stop, first

    def run(self) -> None:
        due = time.monotonic()
        for number in itertools.count(self._first):
            due = max(due + 1 / self._rate, time.monotonic() - 1)
            if self._stop_set.wait(max(0.0, due - time.monotonic())):
                break
            try:
                self._act(self._ports, number)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                if not self._stop_set.is_set():
                    self._ports.counted.failed(self.name, error)
        self._ports.close()


def lanes(stage: Stage, scale: float, make: Callable[[], Ports], stop: threading.Event) -> list[Lane]:
    """All lanes, each with ports of its own."""
    found = []
    for name, rate in RATES.items():
        count = POLLERS if name == "poll" else 1
        found += [Lane(getattr(stage, name), rate * scale / count, make(), stop, place) for place in range(count)]
    return found
