"""A push through a whole server: subscribed and published by the official SDK, received and verified by its rules."""

import http.server
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from veilmq.testing.local import LocalServer

pytestmark = pytest.mark.slow


class Receiver(http.server.BaseHTTPRequestHandler):
    got: list[tuple[str, dict[str, str], bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.got.append((self.path, headers, body))  # type: ignore[attr-defined]
        self.server.came.release()  # type: ignore[attr-defined]
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.got = []
    server.came = threading.Semaphore(0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_push_bears_a_signature_that_our_certificate_verifies(receiver: Any, veilmq_server: LocalServer) -> None:
    """The fixture's server pushes to this machine without an option."""
    import base64

    from mns.account import Account
    from mns.subscription import SubscriptionMeta
    from mns.topic import TopicMessage, TopicMeta

    account = Account(veilmq_server.mns_url, "id", "secret")
    topic = account.get_topic("news")
    topic.create(TopicMeta())
    endpoint = f"http://127.0.0.1:{receiver.server_port}/notifications"
    topic.get_subscription("s").subscribe(SubscriptionMeta(endpoint, notify_content_format="SIMPLIFIED"))
    topic.publish_message(TopicMessage("hello"))
    assert receiver.came.acquire(timeout=30)
    path, headers, body = receiver.got[0]
    url = base64.b64decode(headers["x-mns-signing-cert-url"]).decode()
    with urllib.request.urlopen(url, timeout=10) as answer:
        key = x509.load_pem_x509_certificate(answer.read()).public_key()
    assert isinstance(key, rsa.RSAPublicKey)
    extra = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers) if name.startswith("x-mns-"))
    text = f"POST\n{headers['content-md5']}\n{headers['content-type']}\n{headers['date']}\n{extra}{path}"
    key.verify(base64.b64decode(headers["authorization"]), text.encode(), padding.PKCS1v15(), hashes.SHA1())
    account.mns_client.close_connection()
    assert body.decode() in ("hello", base64.b64encode(b"hello").decode())


class Stubborn(Receiver):
    """Answers only when it is told to."""

    def do_POST(self) -> None:
        if not self.server.answers.is_set():  # type: ignore[attr-defined]
            self.server.reached.set()  # type: ignore[attr-defined]
            self.server.answers.wait(60)  # type: ignore[attr-defined]
            return  # its server is dead
        super().do_POST()


def test_a_server_killed_amid_a_push_pushes_again(tmp_path: Path) -> None:
    endpoint: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stubborn)
    endpoint.got, endpoint.came = [], threading.Semaphore(0)
    endpoint.answers, endpoint.reached = threading.Event(), threading.Event()
    thread = threading.Thread(target=endpoint.serve_forever)
    thread.start()
    local = LocalServer(tmp_path, "--push-allow", "127.0.0.0/8")
    try:
        mns = local.process.mns

        def ask(method: str, path: str, body: str) -> None:
            urllib.request.urlopen(urllib.request.Request(mns + path, body.encode(), method=method), timeout=30).close()

        ask("PUT", "/topics/news", "<Topic/>")
        url = f"http://127.0.0.1:{endpoint.server_port}/hook"
        form = "<NotifyContentFormat>SIMPLIFIED</NotifyContentFormat>"
        ask("PUT", "/topics/news/subscriptions/s", f"<Subscription><Endpoint>{url}</Endpoint>{form}</Subscription>")
        ask("POST", "/topics/news/messages", "<Message><MessageBody>survivor</MessageBody></Message>")
        assert endpoint.reached.wait(30)
        local.process.kill()
        endpoint.answers.set()
        local.process.start()
        local.advance(seconds=31)  # the lease of the attempt that died
        assert endpoint.came.acquire(timeout=30)
        assert [body for _, _, body in endpoint.got] == [b"survivor"]
        token = (local.process.data / "admin-token").read_text().strip()
        request = urllib.request.Request(f"{local.admin_url}/metrics", headers={"Authorization": f"Bearer {token}"})
        told = ""
        while 'veilmq_pushes_total{result="delivered"} 1.0' not in told:
            with urllib.request.urlopen(request, timeout=30) as answer:
                told = answer.read().decode()
    finally:
        local.stop()
        endpoint.answers.set()
        endpoint.shutdown()
        thread.join()
        endpoint.server_close()
