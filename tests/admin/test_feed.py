"""Events, trace, snapshot and backup over HTTP, against what the store holds."""

import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pyarrow as pa
import pytest
from starlette.requests import Request
from starlette.responses import Response
from tests.admin.server import OPTIONS, TOKEN
from tests.support.sqlite import read_events

from veilmq.admin.access import Caller
from veilmq.admin.history import Scope, feed
from veilmq.engine.upkeep import Upkeep
from veilmq.model.instant import DAY_US
from veilmq.store.sqlite.store import SqliteStore
from veilmq.testing.for_each import for_each

QUEUES = "/api/v1/queues/000000000000/us-east-1"
ORDERS = f"{QUEUES}/orders"
ARROW = {"Accept": feed.MEDIA_TYPE}


@pytest.fixture
def lively(http: httpx.Client) -> httpx.Client:
    """A queue with a history of most kinds, in commits of one and of several events."""
    http.put(QUEUES + "/failed")
    http.put(ORDERS, json={"redrive": {"target": "failed", "receive_count_max": 1}})
    bodies = [{"body": f"{number}", "group": "g" if number % 2 else None, "priority": 3} for number in range(20)]
    http.post(ORDERS + "/messages", json={"messages": bodies})
    for round_ in range(3):
        messages = http.post(ORDERS + "/receive", json={"count": 5}).json()["messages"]
        handles = [message["handle"] for message in messages]
        http.post(ORDERS + "/extend", json={"handles": handles, "lease_us": 0 if round_ else 60_000_000})
        http.post(ORDERS + "/delete", json={"handles": handles[:2]})
        http.post(ORDERS + "/delete", json={"handles": handles[:1]})
    http.post(ORDERS + "/receive", json={"count": 10})  # what was given back comes behind the last five
    http.post(ORDERS + "/purge")
    return http


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def stored(server: Any, start: int = 0, count_max: int = 10_000) -> list[dict[str, Any]]:
    with server.store.reader.look() as view:
        found = read_events(view, start, count_max)
    return [msgspec.to_builtins(record) for record in found]


def test_json_lines_are_the_stored_events(lively: httpx.Client, server: Any) -> None:
    answer = lively.get("/api/v1/events")
    found = lines(answer)
    assert found == stored(server)
    assert {"dead_lettered", "delete_refused", "released", "purged", "extended"} <= {event["kind"] for event in found}
    assert [event["offset"] for event in found] == list(range(len(found)))
    headers = answer.headers
    assert (headers["veilmq-first-offset"], headers["veilmq-start-offset"]) == ("0", "0")
    assert headers["veilmq-next-offset"] == str(len(found))
    assert headers["veilmq-epoch"] == lines(lively.get("/api/v1/snapshot"))[0]["snapshot"]["epoch"]


@for_each(
    ("accept", "wanted"),
    [
        ("", False),
        ("*/*", False),
        ("application/x-ndjson", False),
        (feed.MEDIA_TYPE, True),
        (feed.MEDIA_TYPE.upper(), True),
        (f"text/html, {feed.MEDIA_TYPE} ; q=0.5", True),
        (f"{feed.MEDIA_TYPE}, */*", True),
        (f"{feed.MEDIA_TYPE};q=0", False),
        (f"{feed.MEDIA_TYPE};Q=0.000, */*", False),
        (f"{feed.MEDIA_TYPE};q=0.5, application/x-ndjson", False),
        (f"{feed.MEDIA_TYPE};q=0.5, application/x-ndjson;q=0.1, */*", True),
        (f"{feed.MEDIA_TYPE};q=0.5, application/*;q=0.6", False),
        (f"{feed.MEDIA_TYPE}ing", False),
        (f"{feed.MEDIA_TYPE};q=high", False),
    ],
)
def test_arrow_is_sent_to_who_accepts_it(accept: str, wanted: bool) -> None:
    assert feed.is_arrow_wanted(accept) is wanted


def test_what_is_accepted_is_sent(lively: httpx.Client) -> None:
    several = [("Accept", "text/html"), ("Accept", feed.MEDIA_TYPE.title())]
    assert lively.get("/api/v1/events", headers=several).headers["content-type"] == feed.MEDIA_TYPE
    answer = lively.get("/api/v1/events", headers={"Accept": f"{feed.MEDIA_TYPE};q=0"})
    assert answer.headers["content-type"].startswith("application/x-ndjson")


@pytest.mark.parametrize("rows_a_piece", [1, 3, 7, 8_192])
def test_arrow_says_what_json_says(lively: httpx.Client, server: Any, rows_a_piece: int) -> None:
    from veilmq.admin.history import feed

    before = feed.ROWS_A_PIECE
    feed.ROWS_A_PIECE = rows_a_piece  # type: ignore[misc]
    try:
        for start, limit in ((0, 10_000), (3, 1), (5, 17)):
            members = {"from": start, "limit": limit}
            table = pa.ipc.open_stream(lively.get("/api/v1/events", params=members, headers=ARROW).content).read_all()
            rows = table.to_pylist()
            for row in rows:
                row["detail"] = None if row["detail"] is None else json.loads(row["detail"])
            assert rows == stored(server, start, limit)
    finally:
        feed.ROWS_A_PIECE = before  # type: ignore[misc]


def test_dictionaries_hold_each_name_once(lively: httpx.Client) -> None:
    reader = pa.ipc.open_stream(lively.get("/api/v1/events", headers=ARROW).content)
    for batch in reader:
        for column in batch.columns:
            if pa.types.is_dictionary(column.type):
                names = column.dictionary.to_pylist()
                assert len(names) == len(set(names))


def test_an_empty_range_is_a_whole_arrow_stream(http: httpx.Client) -> None:
    table = pa.ipc.open_stream(http.get("/api/v1/events", headers=ARROW).content).read_all()
    assert table.num_rows == 0
    assert "held_us" in table.column_names


def test_a_range_ends_where_the_header_says(lively: httpx.Client, server: Any) -> None:
    answer = lively.get("/api/v1/events", params={"from": 4, "limit": 6})
    assert lines(answer) == stored(server, 4, 6)
    assert (answer.headers["veilmq-start-offset"], answer.headers["veilmq-next-offset"]) == ("4", "10")
    end = lively.get("/api/v1/events", params={"from": "next"})
    assert (end.text, end.headers["veilmq-next-offset"]) == ("", str(len(stored(server))))


def test_an_offset_beyond_the_end_is_refused(lively: httpx.Client, server: Any) -> None:
    answer = lively.get("/api/v1/events", params={"from": len(stored(server)) + 1})
    assert (answer.status_code, answer.json()["field"]) == (400, "from")


def test_a_follower_gets_what_comes(lively: httpx.Client, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_FOLLOW_LOOK_S", 3_600.0)  # nothing but a commit wakes it
    found: list[dict[str, Any]] = []
    asked = threading.Event()

    def follow() -> None:
        with httpx.Client(base_url=server.url, headers=lively.headers, timeout=60) as other:
            other.event_hooks["request"] = [lambda request: asked.set()]
            found.extend(lines(other.get("/api/v1/events", params={"from": "next", "follow": 30})))

    start = len(stored(server))
    follower = threading.Thread(target=follow)
    follower.start()
    assert asked.wait(20)
    # Until its `next` is taken, what we send is before it: so send until it got something.
    while follower.is_alive():
        lively.post(ORDERS + "/messages", json={"messages": [{"body": "new"}]})
        follower.join(0.05)
    assert found[0]["kind"] == "sent"
    assert found[0]["offset"] >= start
    assert not server.shell.stats.followers


def test_a_follower_of_a_busy_server_is_not_answered_once_a_commit(
    lively: httpx.Client, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_GATHER_S", 0.5)
    began = time.monotonic()
    offset, answers, over = len(stored(server)), 0, threading.Event()

    def post() -> None:
        with httpx.Client(base_url=server.url, headers=lively.headers, timeout=60) as other:
            while not over.is_set():
                other.post(ORDERS + "/messages", json={"messages": [{"body": "new"}]})

    poster = threading.Thread(target=post)
    poster.start()
    got: list[dict[str, Any]] = []
    while len(got) < 100:
        answer = lively.get("/api/v1/events", params={"from": offset, "follow": 30})
        got += lines(answer)
        offset = int(answer.headers["veilmq-next-offset"])
        answers += 1
    over.set()
    poster.join(20)
    assert got == stored(server, got[0]["offset"], len(got))
    assert answers <= (time.monotonic() - began) / feed._GATHER_S + 1


def test_a_follower_is_answered_when_the_port_closes(
    lively: httpx.Client, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_FOLLOW_LOOK_S", 3_600.0)
    answers: list[httpx.Response] = []

    def follow() -> None:
        with httpx.Client(base_url=server.url, headers=lively.headers, timeout=60) as other:
            answers.append(other.get("/api/v1/events", params={"from": "next", "follow": 30}))

    follower = threading.Thread(target=follow)
    follower.start()
    while not server.shell.stats.followers:
        follower.join(0.01)
        assert follower.is_alive()
    server.loop.call_soon_threadsafe(server.shell.stats.dismiss_followers)
    follower.join(20)
    assert [(answer.status_code, answer.text) for answer in answers] == [(200, "")]
    late = lively.get("/api/v1/events", params={"from": "next", "follow": 30})
    assert (late.status_code, late.text) == (200, "")


def test_follow_ends_empty_when_its_time_is_over(lively: httpx.Client, server: Any) -> None:
    answer = lively.get("/api/v1/events", params={"from": "next", "follow": 0.1})
    assert (answer.status_code, answer.text) == (200, "")
    assert int(answer.headers["veilmq-next-offset"]) == len(stored(server))


def test_a_trimmed_offset_is_gone(running: Any, tmp_path: Path) -> None:
    options = msgspec.structs.replace(OPTIONS, history_bytes_max=1)
    with running(tmp_path / "data", options=options) as server, _client(server) as http:
        http.put(ORDERS)
        for _ in range(200):
            http.post(ORDERS + "/messages", json={"messages": [{"body": "a"}]})
            answer = http.get("/api/v1/events?from=0")
            if answer.status_code == 410:
                break
            server.on_loop(_sweep(server))
        first = answer.json()["first_offset"]
        assert first > 0
        assert http.get("/api/v1/events?from=0", headers=ARROW).status_code == 410
        assert lines(http.get("/api/v1/events?from=first"))[0]["offset"] >= first


@pytest.mark.parametrize("form", [{}, ARROW], ids=["lines", "arrow"])
def test_what_an_answer_still_has_to_tell_is_not_trimmed(
    running: Any, tmp_path: Path, form: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "ROWS_A_PIECE", 10)
    options = msgspec.structs.replace(OPTIONS, history_bytes_max=6_000)
    with running(tmp_path / "data", options=options, prepare=_sweeps_only_when_told) as server, _client(server) as http:
        first = _fill(http, server)
        headers = [(name.lower().encode(), value.encode()) for name, value in form.items()]
        asked = {"type": "http", "method": "GET", "query_string": b"limit=1000", "headers": headers}
        told = server.on_loop(_events(server, Request(asked | {"veilmq.caller": Caller()})))
        start, stop = (int(told.headers[name]) for name in (feed.START_HEADER, feed.NEXT_HEADER))
        assert first <= start < stop - 30
        parts = []
        for _ in range(2):  # before the first piece, and between two
            for _ in range(3):
                _send_and_sweep(http, server)
            server.store.pins.__init__()  # as if the time of those before were over
            parts.append(server.on_loop(_next(told.body_iterator)))
        for _ in range(3):
            _send_and_sweep(http, server)
        assert start < _first(http) <= start + 20
        while part := server.on_loop(_next(told.body_iterator)):
            parts.append(part)
        if form:
            offsets = pa.ipc.open_stream(b"".join(parts)).read_all().column("offset").to_pylist()
        else:
            offsets = [json.loads(line)["offset"] for line in b"".join(parts).splitlines()]
        assert offsets == list(range(start, stop))


def test_a_reader_whom_trimming_outruns_is_cut_off_and_no_failure(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "ROWS_A_PIECE", 10)
    pieces = feed.Feed._pieces

    def outrun(self: feed.Feed, written: Any, start: int, stop: int, scope: Scope) -> Iterator[bytes]:
        yield from pieces(self, written, start, start + 10, scope)
        yield from pieces(self, written, 0, stop, scope)  # long gone

    options = msgspec.structs.replace(OPTIONS, history_bytes_max=6_000)
    with running(tmp_path / "data", options=options) as server, _client(server) as http:
        _fill(http, server)
        monkeypatch.setattr(feed.Feed, "_pieces", outrun)
        with pytest.raises(httpx.RemoteProtocolError):
            http.get("/api/v1/events")
        assert 'veilmq_failures_total{listener="admin"} 0.0' in http.get("/metrics").text


def test_who_will_come_for_it_may_have_it_held(running: Any, tmp_path: Path) -> None:
    options = msgspec.structs.replace(OPTIONS, history_bytes_max=6_000)
    with running(tmp_path / "data", options=options) as server, _client(server) as http:
        _fill(http, server)
        start = http.get("/api/v1/events?from=first&limit=1&hold=600").headers[feed.START_HEADER]
        for _ in range(5):
            _send_and_sweep(http, server)
        answer = http.get(f"/api/v1/events?from={start}")
        assert (answer.status_code, lines(answer)[0]["offset"]) == (200, int(start))
        for wrong in ("-1", "601", "x"):
            refused = http.get(f"/api/v1/events?hold={wrong}")
            assert (refused.status_code, refused.json()["field"]) == (400, "hold")


async def _events(server: Any, request: Request) -> Response:
    return await feed.Feed(server.store.reader, server.shell).events(request)


async def _next(parts: AsyncIterator[bytes]) -> bytes:
    return await anext(parts, b"")


def _sweeps_only_when_told(server: Any) -> None:
    """A sweep of its own could come just when the test lets the time of all holds be over."""
    engine = server._engine
    engine.limits = msgspec.structs.replace(engine.limits, sweep_every_us=DAY_US, snapshot_every_us=DAY_US)
    engine._upkeep = Upkeep(engine.limits)


def _fill(http: httpx.Client, server: Any) -> int:
    """Until the oldest events were trimmed: the first offset."""
    http.put(ORDERS)
    while not (first := _first(http)):
        _send_and_sweep(http, server)
    return first


def _first(http: httpx.Client) -> int:
    return int(http.get("/api/v1/events?from=next").headers[feed.FIRST_HEADER])


def _send_and_sweep(http: httpx.Client, server: Any) -> None:
    http.post(ORDERS + "/messages", json={"messages": [{"body": "a"}, {"body": "b"}]})
    messages = http.post(ORDERS + "/receive", json={"count": 10}).json()["messages"]
    http.post(ORDERS + "/delete", json={"handles": [message["handle"] for message in messages]})
    server.on_loop(_sweep(server))


async def _sweep(server: Any) -> None:
    from veilmq.model.commands import Sweep

    await server.shell.call(Sweep())


def test_a_trace_has_everything_of_one_message(lively: httpx.Client, server: Any) -> None:
    events = stored(server)
    for message in {event["message"] for event in events if event["message"]}:
        mine = [event for event in events if event["message"] == message]
        sequences = {event["sequence"] for event in mine}
        sequences |= {(event["detail"] or {}).get("target_sequence") for event in mine} - {None}
        stayed = not any(event["kind"] in {"deleted", "dead_lettered"} for event in mine)
        # A refusal after the message was gone has its sequence alone; a purge takes what is there without naming it.
        wanted = [
            event
            for event in events
            if event["message"] == message
            or (event["message"] is None and event["sequence"] in sequences)
            or (stayed and event["kind"] == "purged")
        ]
        shown = lively.get(f"/api/v1/trace/{message}").json()
        for event in shown["events"]:
            if event["kind"] == "dead_lettered":  # a trace says the name as well
                assert event["detail"].pop("target_queue") == "failed"
        assert shown["events"] == wanted
        assert shown["complete"]
    assert any(event["kind"] == "delete_refused" and event["message"] is None for event in events)


def test_a_trace_takes_the_form_of_a_uuid_and_tells_when_it_stopped(lively: httpx.Client) -> None:
    import uuid

    sent = lively.post(ORDERS + "/messages", json={"messages": [{"body": "a"}]}).json()["messages"][0]["id"]
    for _ in range(3):
        lively.post(ORDERS + "/messages", json={"messages": [{"body": "b"}]})
    whole = lively.get(f"/api/v1/trace/{uuid.UUID(sent)}").json()
    assert [event["kind"] for event in whole["events"]] == ["sent"]
    cut = lively.get(f"/api/v1/trace/{sent}", params={"scan": 1}).json()
    assert (cut["complete"], cut["events"]) == (False, [])


def test_a_snapshot_is_the_state_at_its_offset(lively: httpx.Client, server: Any) -> None:
    messages = [{"body": "a" * size} for size in range(1, 8)]
    lively.post(ORDERS + "/messages", json={"messages": messages})
    lively.post(ORDERS + "/receive", json={"count": 2})
    lively.post(ORDERS + "/messages", json={"messages": [{"body": "later", "delay_us": 60_000_000}]})
    head, *rest = lines(lively.get("/api/v1/snapshot"))
    assert head["snapshot"]["offset"] == len(stored(server))
    queues = {line["queue"]["name"]: line["queue"] for line in rest if "queue" in line}
    assert set(queues) == {"orders", "failed"}
    held = [line["message"] for line in rest if "message" in line]
    mine = [each for each in held if each["incarnation"] == queues["orders"]["incarnation"]]
    states = [each["state"] for each in mine]
    counts = lively.get(ORDERS).json()["counts"]
    shown = {state: states.count(state) for state in ("visible", "in flight", "delayed")}
    assert shown == {"visible": 5, "in flight": 2, "delayed": 1}
    assert list(shown.values()) == [counts["visible"], counts["in_flight"], counts["delayed"]]
    assert [each["body_bytes"] for each in mine] == [1, 2, 3, 4, 5, 6, 7, 5]
    failed = [each for each in held if each["incarnation"] == queues["failed"]["incarnation"]]
    assert len(failed) == lively.get(QUEUES + "/failed").json()["counts"]["total"] > 0


def test_a_backup_can_be_served_and_honours_no_old_handle(
    lively: httpx.Client, server: Any, running: Any, tmp_path: Path
) -> None:
    lively.post(ORDERS + "/messages", json={"messages": [{"body": "kept"}, {"body": "leased"}]})
    handle = lively.post(ORDERS + "/receive").json()["messages"][0]["handle"]
    answer = lively.post("/api/v1/backup")
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) == len(answer.content)
    copy = tmp_path / "copy"
    copy.mkdir(mode=0o700)
    (copy / "veilmq.db").write_bytes(answer.content)
    assert not [path for path in (tmp_path / "data").iterdir() if path.name.startswith("backup")]
    with running(copy) as other, _client(other) as http:
        refused = http.post(ORDERS + "/delete", json={"handles": [handle]})
        assert (refused.status_code, refused.json()["error"]) == (400, "ReceiptInvalid")
        assert [each["body"] for each in http.post(ORDERS + "/receive", json={"count": 5}).json()["messages"]] == [
            "leased"
        ]
        assert http.get(ORDERS).json()["counts"]["in_flight"] == 2


def test_pages_of_arrow_pass_over_the_bounds_of_commits(lively: httpx.Client, server: Any) -> None:
    store: SqliteStore = server.store
    total = len(stored(server))
    with store.reader.look() as view:
        for start in range(total):
            for stop in range(start + 1, min(start + 9, total + 1)):
                written = feed.ArrowStream()
                data = written.batch(view, start, stop, Scope()) + written.end()
                table = pa.ipc.open_stream(data).read_all()
                assert table["offset"].to_pylist() == list(range(start, stop))


def _client(server: Any) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30)


@for_each(
    ("asked", "wanted"),
    [
        ({"kind": "sent"}, lambda event: event["kind"] == "sent"),
        ({"kind": "sent, lease_expired,deleted"}, lambda event: event["kind"] in {"sent", "lease_expired", "deleted"}),
        ({"queue": "failed"}, lambda event: "failed" in (event["queue"], event["goes_to"])),
        ({"queue": "000000000000/us-east-1/orders"}, lambda event: "orders" in (event["queue"], event["goes_to"])),
        ({"queue": "000000000000/eu-west-1/orders"}, lambda event: False),
        ({"queue": "failed", "kind": "dead_lettered"}, lambda event: event["kind"] == "dead_lettered"),
    ],
    ids=lambda each: "-".join(each.values()) if isinstance(each, dict) else "",
)
def test_events_are_chosen(lively: httpx.Client, asked: dict[str, str], wanted: Any) -> None:
    everything = lines(lively.get("/api/v1/events"))
    names = {event["incarnation"]: event["queue"] for event in everything}
    for event in everything:
        event["goes_to"] = names.get((event["detail"] or {}).get("target"))
    expected = [event["offset"] for event in everything if wanted(event)]
    answer = lively.get("/api/v1/events", params=asked)
    assert [event["offset"] for event in lines(answer)] == expected
    assert answer.headers["veilmq-next-offset"] == str(len(everything))
    table = pa.ipc.open_stream(lively.get("/api/v1/events", params=asked, headers=ARROW).content).read_all()
    assert table["offset"].to_pylist() == expected


def test_events_of_one_message_are_chosen_by_its_id_in_either_form(lively: httpx.Client) -> None:
    everything = lines(lively.get("/api/v1/events"))
    message = next(event["message"] for event in everything if event["kind"] == "dead_lettered")
    expected = [event for event in everything if event["message"] == message]
    assert len(expected) > 2
    assert uuid.UUID(message).version == 4
    for text in (message, message.replace("-", "").upper()):
        assert lines(lively.get("/api/v1/events", params={"message": text})) == expected


@pytest.mark.parametrize(
    ("asked", "says"),
    [({"kind": "sent,nope"}, "dead_lettered"), ({"queue": "a/b"}, "account/region/name"), ({"message": "x"}, "UUID")],
)
def test_what_cannot_be_chosen_is_refused(lively: httpx.Client, asked: dict[str, str], says: str) -> None:
    answer = lively.get("/api/v1/events", params=asked)
    assert (answer.status_code, answer.json()["field"]) == (400, *asked)
    assert says in answer.json()["message"]
