"""The accelerator's functions beside their twins in Python: what is compared, and a way to do without them."""

import contextlib
import hmac
from collections.abc import Callable, Iterator
from hashlib import sha256
from types import ModuleType
from typing import Any

from veilmq.accelerator import TWINS
from veilmq.model.instant import Instant
from veilmq.model.settings.access import EVERYTHING, AccessKey
from veilmq.protocols import Request
from veilmq.protocols.sqs import auth, plain
from veilmq.protocols.sqs.call import Entry
from veilmq.protocols.sqs.errors import Refusal
from veilmq.protocols.sqs.operations import messages
from veilmq.server.http import Limits
from veilmq.store.sqlite.messages import sends

SHORTCUTS: dict[str, tuple[ModuleType, str]] = {
    "plain_scheme": (auth, "_PLAIN_SCHEME"),
    "plain_send": (messages, "PLAIN_SEND"),
    "plain_sends": (messages, "PLAIN_SENDS"),
    "plain_deletes": (messages, "PLAIN_DELETES"),
    "sent_json": (plain, "SENT_JSON"),
    "entries_json": (plain, "ENTRIES_JSON"),
    "received_json": (plain, "RECEIVED_JSON"),
    "plain_rows": (sends, "_PLAIN_ROWS"),
}
"""By name: where each is used."""


SECRET, STAMP, SCOPE = "secret", b"20261127T001500Z", b"20261127/us-east-1/sqs/aws4_request"
WALL = Instant(1_795_738_500_000_000)
NAMES = [b"host", b"x-amz-date", b"x-amz-target"]


class Ring:
    """One key, or none."""

    checks = True

    def __init__(self) -> None:
        self.key: AccessKey | None = AccessKey("AKID", SECRET, "111122223333", grants=EVERYTHING)

    def find(self, key_id: str) -> AccessKey | None:
        return self.key if key_id == "AKID" else None


def signed(body: bytes, values: tuple[bytes, bytes] = (b"h", b"t"), stamp: bytes = STAMP, **others: bytes) -> Request:
    """A POST to `/`, signed by the standard library. others: headers that are not signed."""
    headers = dict(zip(NAMES, (values[0], stamp, values[1]), strict=True))
    lines = b"".join(b"%b:%b\n" % each for each in headers.items())
    canonical = b"POST\n/\n\n%b\n%b\n%b" % (lines, b";".join(NAMES), sha256(body).hexdigest().encode())
    key = b"AWS4" + SECRET.encode()
    for part in SCOPE.split(b"/"):
        key = hmac.digest(key, part, "sha256")
    text = b"AWS4-HMAC-SHA256\n%b\n%b\n%b" % (stamp, SCOPE, sha256(canonical).hexdigest().encode())
    scheme = b"AWS4-HMAC-SHA256 Credential=AKID/%b, SignedHeaders=%b, Signature=" % (SCOPE, b";".join(NAMES))
    headers[b"authorization"] = scheme + hmac.digest(key, text, "sha256").hex().encode()
    headers |= {name.replace("_", "-").encode(): value for name, value in others.items()}
    return Request("POST", b"/", headers, body, "peer", False, "id")


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """Without the shortcuts."""
    kept = [(module, name, getattr(module, name)) for module, name in SHORTCUTS.values()]
    for module, name, _ in kept:
        setattr(module, name, None)
    try:
        yield
    finally:
        for module, name, function in kept:
            setattr(module, name, function)


def both(work: Callable[[], Any]) -> Any:
    """What it gives, or its refusal; the same in both ways. Raises AssertionError."""
    got = _outcome(work)
    with in_python():
        wanted = _outcome(work)
    assert shown(got) == shown(wanted), f"the accelerator disagrees with Python: {shown(got)} {shown(wanted)}"
    return got


def read_by_both(stream: bytes, limits: Limits) -> Request | None:
    """The request that it is to Python, and to the accelerator, which leaves some odd hosts to llhttp."""
    python, c = TWINS["read_plain"]
    wanted, got = (twin(stream, limits, "peer", False, lambda: "id") for twin in (python, c))
    if wanted is not None and not {*b"[%"} & {*wanted.host}:
        assert got is not None, "the accelerator leaves a plain request to llhttp"
    if got is not None:
        assert got == wanted, "the accelerator reads a request in another way"
        assert list(got.headers.items()) == list(wanted.headers.items())
    found: Request | None = wanted
    return found


def _outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Refusal as refusal:
        return refusal


def shown(what: Any) -> Any:
    """The same with refusals as values, which compare; of a call, what the accelerator makes."""
    if isinstance(what, Entry):
        return what.id, what.command, shown(what.refusal)
    if hasattr(what, "commands"):  # a call, of any protocol
        return what.commands, shown(getattr(what, "memo", None))
    if callable(what):
        return None
    if isinstance(what, Refusal):
        return what.fault, what.message
    return [shown(each) for each in what] if isinstance(what, tuple | list) else what
