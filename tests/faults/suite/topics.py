"""A topic under faults: what was published is pushed to a receiver on this machine, and copied to a queue exactly once.

Strategy: each publish has a body of its own, and is sent once. A publish that was acknowledged must be pushed, as often
as it may be, and must have one copy in the queue; one without an answer may have one; no other body may come.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.parse import urlsplit

from mns.account import Account as SdkAccount
from mns.subscription import SubscriptionMeta

from veilmq.client.adapters.connect import connect_account
from veilmq.client.errors import may_have_happened
from veilmq.client.messages import Message
from veilmq.client.queue import NativeSubscription
from veilmq.driver import PATIENCE_SECONDS
from veilmq.model.errors import VeilError

TOPIC, COPIES = "news", "copies"
PUBLISHERS = 2
_PAUSE_SECONDS = 0.02


class Topics:
    """The topic, its publishers and its receiver."""

    name = "topics"

    def __init__(self, urls: dict[str, str]) -> None:
        self.operations = 0
        self.violations: list[str] = []
        self.use(urls)
        self._numbers = count()
        self._published: set[str] = set()
        """Acknowledged."""
        self._unknown: set[str] = set()
        self._pushed: set[str] = set()
        self._copies: dict[str, set[str]] = defaultdict(set)
        """By body: ids of messages."""
        self._said: set[str] = set()

    def use(self, urls: dict[str, str]) -> None:
        """Reach the server by these from now on."""
        self._url = f"{urls['mns']}&base64=0"

    def open(self) -> None:
        """Make the topic, and subscribe a queue and the receiver."""
        pushed = self._pushed

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                pushed.add(self.rfile.read(int(self.headers["Content-Length"])).decode())
                self.send_response(204)
                self.end_headers()

            def log_request(self, *told: object) -> None:
                """Say nothing."""

        self._receiver = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
        threading.Thread(target=self._receiver.serve_forever, daemon=True).start()
        with connect_account(self._url) as account:
            account.create(COPIES)
            topics = account.topics()  # type: ignore[attr-defined]
            topics.create(TOPIC, [COPIES])
            topics.subscribe(TOPIC, NativeSubscription("to-copies", COPIES, None))
        place = urlsplit(self._url)
        sdk = SdkAccount(f"http://{place.hostname}:{place.port}", "x", "y")
        endpoint = f"http://127.0.0.1:{self._receiver.server_port}/"
        meta = SubscriptionMeta(endpoint, "EXPONENTIAL_DECAY_RETRY", "SIMPLIFIED")
        sdk.get_subscription(TOPIC, "to-receiver").subscribe(meta)
        sdk.mns_client.http.conn.close()

    def round(self, seconds: float) -> None:
        """Publish for so long, then look for all of it."""
        stop = threading.Event()
        with ThreadPoolExecutor(PUBLISHERS, "publisher") as pool:
            publishers = [pool.submit(self._publish, stop) for _ in range(PUBLISHERS)]
            stop.wait(seconds)
            stop.set()
            for each in publishers:
                each.result()
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(VeilError):
                self._collect()
                if self._published <= self._pushed and self._published <= self._copies.keys():
                    break
            time.sleep(0.2)
        new = set(self._broken()) - self._said
        self._said |= new
        self.violations += sorted(new)

    def _publish(self, stop: threading.Event) -> None:
        with connect_account(self._url) as account:
            topics = account.topics()  # type: ignore[attr-defined]
            while not stop.is_set():
                body = f"news {next(self._numbers)}"
                self.operations += 1
                self._unknown.add(body)
                try:
                    (answer,) = topics.publish(TOPIC, [Message(body)])
                except VeilError as error:
                    answer = error
                if not isinstance(answer, VeilError):
                    self._published.add(body)
                elif not may_have_happened(answer):
                    self._unknown.discard(body)
                stop.wait(_PAUSE_SECONDS)

    def _collect(self) -> None:
        with connect_account(self._url) as account:
            queue = account.queue(COPIES)
            while messages := queue.receive(16):
                for message in messages:
                    self._copies[message.body].add(message.id)
                queue.delete_batch([message.handle for message in messages])

    def _broken(self) -> Iterator[str]:
        for body in self._published - self._pushed:
            yield f"{body} was published, and was not pushed"
        for body in self._published - self._copies.keys():
            yield f"{body} was published, and has no copy in the queue"
        for body in (self._copies.keys() | self._pushed) - self._published - self._unknown:
            yield f"{body} came, and nobody published it"
        for body, ids in self._copies.items():
            if len(ids) > 1:
                yield f"{body} has {len(ids)} copies in the queue"

    def close(self) -> None:
        """End the receiver."""
        self._receiver.shutdown()
        self._receiver.server_close()
