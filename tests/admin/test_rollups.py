"""/api/v1/queues/.../rollups: every minute and hour is shown, and a gap is none of zeros."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.admin.conftest import client
from tests.admin.server import OPTIONS, Keys, got, running

from veilmq.model.settings.access import AccessKey, Action, Grant
from veilmq.store.rollups import COUNTS
from veilmq.store.sqlite.batch.rollups import worst as rankings
from veilmq.testing.for_each import for_each

QUEUES = "/api/v1/queues/000000000000/us-east-1"
ORDERS = f"{QUEUES}/orders"
SECOND, MINUTE, HOUR = 1_000_000, 60_000_000, 3_600_000_000


def later(http: httpx.Client, by_us: int) -> None:
    assert http.post("/api/v1/clock", json={"advance_us": by_us}).status_code == 200


def rolled_up(http: httpx.Client, **members: Any) -> list[dict[str, Any]]:
    answer = http.get(ORDERS + "/rollups", params=members)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["rollups"]
    return found


def counted(rollup: dict[str, Any]) -> dict[str, int]:
    return {name: rollup[name] for name in COUNTS if rollup[name]}


@pytest.fixture
def orders(http: httpx.Client) -> httpx.Client:
    """A queue in which something happened in a minute that is over, then nothing, then a jump of the clock."""
    assert http.put(ORDERS).status_code == 201
    http.post(ORDERS + "/messages", json={"messages": [{"body": str(number)} for number in range(4)]})
    taken = http.post(ORDERS + "/receive", json={"count": 3, "lease_us": 12 * HOUR}).json()["messages"]
    later(http, 2 * SECOND)
    http.post(ORDERS + "/delete", json={"handles": [taken[0]["handle"]]})
    for _ in range(3):
        later(http, MINUTE)
    later(http, 3 * MINUTE)
    return http


def test_minutes_with_events_without_and_gaps(orders: httpx.Client) -> None:
    found = rolled_up(orders)
    assert [each["at"] for each in found] == list(range(found[0]["at"], found[-1]["at"] + 1, MINUTE))
    assert [each["complete"] for each in found] == [True] * (len(found) - 1) + [False]
    happened = [each for each in found if each["ran"] and counted(each)]
    totals = {name: sum(each[name] for each in happened) for name in COUNTS}
    assert {name: count for name, count in totals.items() if count} == {"sent": 4, "received": 3, "deleted": 1}
    held = happened[-1]["hold_us"]
    assert abs(held["p99"] - 2 * SECOND) < 2 * SECOND / 8
    gaps = [each for each in found if not each["ran"]]
    assert len(gaps) == 2, "the clock jumped over them"
    assert {each[name] for each in gaps for name in (*COUNTS, "depth", "wait_us", "oldest_age_us")} == {None}
    idle = [each for each in found if each["ran"] and not counted(each)]
    assert len(idle) >= 3
    for each in idle:
        assert (each["depth"], each["in_flight"], each["wait_us"]) == (3, 2, None), "as the minute before left it"
    ages = [each["oldest_age_us"] for each in found if each["ran"]]
    assert ages == sorted(ages)
    assert ages[-2] >= 3 * MINUTE


def test_an_hour_is_told_before_it_is_over(orders: httpx.Client) -> None:
    found = rolled_up(orders, step="hour")
    assert sum(each["sent"] for each in found) == 4
    assert found[-1]["complete"] is False
    later(orders, 2 * HOUR)
    again = rolled_up(orders, step="hour")
    assert [each["ran"] for each in again[-3:]] == [True, False, True]
    assert sum(each["sent"] or 0 for each in again) == 4


def test_what_just_happened_is_there_at_once(http: httpx.Client) -> None:
    http.put(ORDERS)
    for number in range(5):
        http.post(ORDERS + "/messages", json={"messages": [{"body": "a"}]})
        assert sum(each["sent"] for each in rolled_up(http)) == number + 1
        assert rolled_up(http)[-1]["depth"] == number + 1


def test_a_range(orders: httpx.Client) -> None:
    everything = rolled_up(orders)
    start, end = everything[1]["at"], everything[3]["at"]
    part = rolled_up(orders, **{"from": start, "to": end})
    assert part == everything[1:3]
    assert rolled_up(orders, **{"from": start + SECOND, "to": end - SECOND}) == everything[1:3]


REFUSED = {
    "too many": ({"from": 0}, "from"),
    "the wrong way round": ({"from": 10 * MINUTE, "to": 9 * MINUTE}, "from"),
    "another step": ({"step": "day"}, "step"),
}


@for_each("case", REFUSED)
def test_a_wrong_range_is_refused(shared: httpx.Client, case: str) -> None:
    shared.put(ORDERS)
    members, field = REFUSED[case]
    answer = shared.get(ORDERS + "/rollups", params=members)
    assert (answer.status_code, answer.json()["field"]) == (400, field)


def test_a_missing_queue_is_not_found_and_a_grant_is_needed(tmp_path: Path) -> None:
    reader = AccessKey("reader", "secret", "111111111111", grants=(Grant(frozenset({Action.DESCRIBE_QUEUE})),))
    sender = AccessKey("sender", "secret", "111111111111", grants=(Grant(frozenset({Action.SEND})),))
    with running(tmp_path / "data", Keys(reader, sender), options=OPTIONS) as server, client(server) as http:
        path = "/api/v1/queues/111111111111/us-east-1/jobs"
        assert http.get(path + "/rollups").status_code == 404
        assert http.put(path).status_code == 201
        for key, status in (("reader", 200), ("sender", 403)):
            with httpx.Client(base_url=server.url, auth=(key, "secret")) as asking:
                assert asking.get(path + "/rollups").status_code == status


def worst(http: httpx.Client, **members: Any) -> dict[str, Any]:
    return got(http, "/api/v1/worst", **members)


def test_the_worst_queues(http: httpx.Client) -> None:
    for number in range(3):
        assert http.put(f"{QUEUES}/q{number}").status_code == 201
        messages = [{"body": "a"}] * (number + 1)
        http.post(f"{QUEUES}/q{number}/messages", json={"messages": messages})
        later(http, SECOND)
    taken = http.post(f"{QUEUES}/q0/receive", json={"lease_us": SECOND}).json()["messages"]
    assert [(each["name"], each["value"]) for each in worst(http, by="in_flight")["queues"]] == [("q0", 1)]
    later(http, 2 * SECOND)
    deep = worst(http, by="depth", limit=2)
    assert [(each["name"], each["value"]) for each in deep["queues"]] == [("q2", 3), ("q1", 2)]
    assert (deep["by"], deep["since"], deep["complete"]) == ("depth", None, True)
    assert deep["queues"][0]["counts"]["total"] == 3
    old = worst(http)
    assert [each["name"] for each in old["queues"]] == ["q0", "q1", "q2"]
    assert all(each["value"] == each["oldest_age_us"] for each in old["queues"])
    http.post(f"{QUEUES}/q0/delete", json={"handles": [taken[0]["handle"]]})
    http.post(f"{QUEUES}/q0/messages", json={"messages": [{"body": "new"}]})
    assert [each["name"] for each in worst(http)["queues"]] == ["q1", "q2", "q0"], "looked up, not by the bound"
    ended = worst(http, by="lease_expired")
    assert [(each["name"], each["value"]) for each in ended["queues"]] == [("q0", 1)]
    assert ended["since"] % HOUR == 0
    assert worst(http, by="failed")["queues"] == []
    assert http.get("/api/v1/worst", params={"by": "age"}).json()["field"] == "by"


def blocked(http: httpx.Client, name: str) -> None:
    """A FIFO queue of which a group has one message in flight, for an hour, and two behind it."""
    assert http.put(f"{QUEUES}/{name}", json={"fifo": True, "content_deduplication": True}).status_code == 201
    messages = [{"body": body, "group": "a"} for body in "abc"]
    http.post(f"{QUEUES}/{name}/messages", json={"messages": messages})
    assert http.post(f"{QUEUES}/{name}/receive", json={"lease_us": HOUR}).json()["messages"]


def test_the_queues_that_stand_still_for_longest(http: httpx.Client) -> None:
    for name in ("first.fifo", "second.fifo"):
        blocked(http, name)
        later(http, MINUTE)
    assert http.put(ORDERS).status_code == 201
    found = worst(http, by="blocked")
    assert [each["name"] for each in found["queues"]] == ["first.fifo", "second.fifo"]
    first, second = found["queues"]
    assert MINUTE <= second["value"] < first["value"] - MINUTE < 2 * MINUTE
    assert first["blocked"] == {"messages": 2, "groups": 1, "complete": True}
    assert first["still_after_us"] == 5 * MINUTE, "at least"
    assert (found["since"], found["complete"]) == (None, True)
    assert [each["name"] for each in worst(http, by="blocked", limit=1)["queues"]] == ["first.fifo"]
    http.patch(f"{QUEUES}/first.fifo", json={"visibility_timeout_us": HOUR})
    http.post(f"{QUEUES}/second.fifo/purge", json={})
    (first,) = worst(http, by="blocked")["queues"]
    assert first["still_after_us"] == HOUR, "a lease may take so long"


def test_what_is_usual_is_learnt_from_what_was_deleted(http: httpx.Client) -> None:
    """Work that takes ten minutes under extended leases is no alarm, though the timeout is 30 s."""
    blocked(http, "slow.fifo")
    messages = [{"body": str(number), "group": str(number)} for number in range(20)]
    http.post(f"{QUEUES}/slow.fifo/messages", json={"messages": messages})
    taken = http.post(f"{QUEUES}/slow.fifo/receive", json={"count": 20, "lease_us": HOUR}).json()["messages"]
    later(http, 10 * MINUTE)
    handles = [each["handle"] for each in taken]
    http.post(f"{QUEUES}/slow.fifo/delete", json={"handles": handles})
    (shown,) = worst(http, by="blocked")["queues"]
    assert shown["value"] > 10 * MINUTE
    assert 18 * MINUTE < shown["still_after_us"] < 22 * MINUTE


def test_dead_letters_are_named_with_the_queue_where_they_are(tmp_path: Path) -> None:
    """If it is there, and the caller may know of it."""
    grants = (Grant(frozenset({Action.LIST_QUEUES}), ("orders",)),)
    narrow = AccessKey("narrow", "secret", "000000000000", grants=grants)
    with running(tmp_path / "data", Keys(narrow), options=OPTIONS) as server, client(server) as http:
        assert http.put(f"{QUEUES}/dead").status_code == 201
        assert http.put(ORDERS, json={"redrive": {"target": "dead", "receive_count_max": 1}}).status_code == 201
        http.post(ORDERS + "/messages", json={"messages": [{"body": "a"}]})
        for _ in range(2):
            http.post(ORDERS + "/receive", json={"lease_us": 0})

        def named(asking: httpx.Client) -> Any:
            (only,) = worst(asking, by="dead_lettered")["queues"]
            return only["dead_letters_to"]

        assert named(http) == {"account": "000000000000", "region": "us-east-1", "name": "dead"}
        with httpx.Client(base_url=server.url, auth=("narrow", "secret")) as asking:
            assert named(asking) is None
        http.delete(f"{QUEUES}/dead")
        assert named(http) is None


def test_a_key_is_shown_the_worst_of_what_it_may_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they are none of the worst that the store keeps."""
    monkeypatch.setattr(rankings, "MEMBERS_MAX", 6)
    monkeypatch.setattr(rankings, "MEMBERS_KEPT", 3)
    grants = (Grant(frozenset({Action.LIST_QUEUES}), ("small*",)),)
    narrow = AccessKey("narrow", "secret", "111111111111", grants=grants)
    other = AccessKey("other", "secret", "222222222222", grants=(Grant(frozenset({Action.LIST_QUEUES})),))
    with running(tmp_path / "data", Keys(narrow, other), options=OPTIONS) as server, client(server) as http:
        place = "/api/v1/queues/111111111111/us-east-1"
        for number in range(12):
            for name, size in ((f"large{number}", 20), (f"small{number}", number + 1)):
                assert http.put(f"{place}/{name}").status_code == 201
                http.post(f"{place}/{name}/messages", json={"messages": [{"body": "a"}] * size})
        for key, expected in (("narrow", ["small11", "small10"]), ("other", [])):
            with httpx.Client(base_url=server.url, auth=(key, "secret")) as asking:
                for by in ("depth", "oldest"):
                    found = [each["name"] for each in worst(asking, by=by, limit=2)["queues"]]
                    assert found == (expected if by == "depth" or not expected else ["small0", "small1"])
                assert asking.get("/api/v1/worst", params={"account": "*"}).status_code == 403
        everything = worst(http, by="depth", account="*", limit=13)["queues"]
        assert [each["value"] for each in everything] == [20] * 12 + [12]


def listed(http: httpx.Client, **members: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = got(http, "/api/v1/queues", **members)["queues"]
    return found


def test_a_list_has_the_same_minutes_as_each_queue(orders: httpx.Client) -> None:
    assert orders.put(f"{QUEUES}/idle").status_code == 201
    orders.post(ORDERS + "/messages", json={"messages": [{"body": "now"}]})
    idle, queue = listed(orders, minutes=60)
    rates, minutes = queue["rates"], {each["at"]: each for each in rolled_up(orders)}
    for place, at in enumerate(range(rates["from"], rates["from"] + 60 * MINUTE, MINUTE)):
        if at in minutes:
            shown = {name: rates[name][place] for name in ("sent", "received", "deleted")}
            assert shown == {name: minutes[at][name] for name in shown}, "null where the server did not run"
    assert sum(each or 0 for each in rates["sent"]) == 5
    assert {each for each in idle["rates"]["sent"] if each} == set()
    assert "rates" not in listed(orders)[0]
    assert orders.get("/api/v1/queues", params={"minutes": 61}).json()["field"] == "minutes"


def test_a_rate_is_of_the_time_in_which_the_server_ran(http: httpx.Client) -> None:
    later(http, MINUTE - http.get("/api/v1/clock").json()["now"] % MINUTE)
    assert http.put(ORDERS).status_code == 201
    http.post(ORDERS + "/messages", json={"messages": [{"body": "x"}] * 90})
    for _ in range(2):
        later(http, MINUTE)
    later(http, 30 * SECOND)
    (queue,) = listed(http, minutes=1)
    assert queue["rates"]["per_second"]["sent"] == 0, "only the present minute"
    (queue,) = listed(http, minutes=60)
    assert 0.55 < queue["rates"]["per_second"]["sent"] <= 0.6, "90 in 150 s, and in the time of this test"
    for _ in range(3):
        later(http, MINUTE)
    (queue,) = listed(http, minutes=60)
    assert queue["rates"]["per_second"]["sent"] == 0


def test_a_list_with_rates_has_short_pages(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veilmq.admin.rollups.RATED_MAX", 2)
    for name in "abc":
        assert http.put(f"{QUEUES}/{name}").status_code == 201
    page = got(http, "/api/v1/queues", minutes=5, limit=3)
    assert ([each["name"] for each in page["queues"]], page["more"], page["after"]) == (["a", "b"], True, "b")
