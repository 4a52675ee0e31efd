"""The text of a worker's error may say what is in a body: it is for keys that may read bodies."""

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.admin.server import Keys

from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.messages import Template
from veilmq.model.messages import Failure
from veilmq.model.settings.access import AccessKey, Action, Grant
from veilmq.testing.for_each import for_each

ACCOUNT = "000000000000"
EVENTS = Grant(frozenset({Action.EVENTS}))
PEEK = Grant(frozenset({Action.PEEK}), ("jobs", "dead"))
KEYS = Keys(
    AccessKey("reader", "secret of reader", ACCOUNT, grants=(EVENTS,)),
    AccessKey("peeker", "secret of peeker", ACCOUNT, grants=(EVENTS, PEEK)),
)
TEXT = "no such zip: 12345"
KINDS = ("released_for_retry", "dead_lettered")


@pytest.fixture(scope="module")
def failed(running: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URL of a server, and the id of a dead letter whose only worker raised."""
    directory = tmp_path_factory.mktemp("failed") / "data"
    with EmbeddedAccount(directory) as account:
        account.create("dead")
        account.create("jobs", Template(dead_letter_queue="dead", receive_count_max=1))
        queue = account.queue("jobs")
        queue.send("12345")
        (message,) = queue.receive()
        queue.release(message.handle, failure=Failure("raised", "KeyError", TEXT))
        assert queue.receive() == []
    with running(directory, KEYS) as server:
        yield server.url, message.id.replace("-", "")


def asked(url: str, key_id: str, **headers: str) -> httpx.Response:
    text = b64encode(f"{key_id}:secret of {key_id}".encode()).decode()
    answer = httpx.get(url, headers={"Authorization": f"Basic {text}", **headers}, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer


def details(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [event["detail"] for event in events if event["kind"] in KINDS]
    return [json.loads(each) if isinstance(each, str) else each for each in found]


@for_each(("key_id", "text"), [("reader", None), ("peeker", TEXT)])
@for_each("way", ["lines", "arrow", "trace"])
def test_the_text_is_told_to_those_who_may_read_bodies(
    failed: tuple[str, str], way: str, key_id: str, text: str | None
) -> None:
    import pyarrow as pa

    url, message = failed
    if way == "trace":
        events = asked(f"{url}/api/v1/trace/{message}", key_id).json()["events"]
    elif way == "arrow":
        answer = asked(f"{url}/api/v1/events", key_id, Accept="application/vnd.apache.arrow.stream")
        events = pa.ipc.open_stream(answer.content).read_all().to_pylist()
    else:
        events = [json.loads(line) for line in asked(f"{url}/api/v1/events", key_id).text.splitlines()]
    given_back, dead = details(events)
    assert given_back.get("error") == dead.get("error") == text
    assert (given_back["reason"], given_back["error_type"], dead["error_type"]) == ("raised", "KeyError", "KeyError")
    assert dead["receives"] == 1


def test_a_dead_letter_shows_how_often_and_why_it_failed(failed: tuple[str, str]) -> None:
    url, _ = failed
    for path in ("peek", "messages"):
        (message,) = asked(f"{url}/api/v1/queues/{ACCOUNT}/us-east-1/dead/{path}", "peeker").json()["messages"]
        assert message["dead_letter_receives"] == 1
        assert message["last_error"] == {"type": "KeyError", "text": TEXT}
