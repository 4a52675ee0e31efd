"""/metrics and /health, read as Prometheus and an orchestrator read them."""

from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tests.admin.server import TOKEN

from veilmq.admin import metrics
from veilmq.model.commands import SERVER, CreateQueue, StartMove, Sweep
from veilmq.model.errors import DiskLow, StoreFailed, StoreUnknown
from veilmq.model.moves import MoveStatus
from veilmq.model.settings.queue import QueueKey
from veilmq.model.settings.topic import SETTINGS_QUEUES
from veilmq.server.config.settings import Settings

QUEUES = "/api/v1/queues/000000000000/us-east-1"


def samples(http: httpx.Client) -> dict[tuple[str, ...], float]:
    """(sample's name, label values sorted by label) -> value."""
    answer = http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_depths_and_ages_are_the_queues(http: httpx.Client) -> None:
    orders = f"{QUEUES}/orders"
    http.put(orders)
    messages = [{"body": "a"}, {"body": "b"}, {"body": "c"}, {"body": "d", "delay_us": 60_000_000}]
    http.post(orders + "/messages", json={"messages": messages})
    http.post(orders + "/receive")
    found = samples(http)
    where = ("000000000000", "orders", "us-east-1")
    depths = {state: found["veilmq_queue_messages", *where, state] for state in ("visible", "in_flight", "delayed")}
    assert depths == {"visible": 2, "in_flight": 1, "delayed": 1}
    assert 0 < found["veilmq_queue_oldest_age_seconds", *where] < 60
    assert found["veilmq_queues",] == 1


def test_a_failure_inside_is_counted(http: httpx.Client, monkeypatch: Any) -> None:
    def broken(self: metrics.Outcomes) -> None:
        raise RuntimeError("broken")

    assert samples(http)["veilmq_failures_total", "admin"] == 0
    with monkeypatch.context() as breaking:
        breaking.setattr(metrics.Outcomes, "catch_up", broken)
        failed = http.get("/metrics")
        assert (failed.status_code, failed.headers["connection"]) == (500, "close")
    assert samples(http)["veilmq_failures_total", "admin"] == 1


def test_queues_beyond_the_bound_are_one_sum(http: httpx.Client, monkeypatch: Any) -> None:
    monkeypatch.setattr(metrics, "LABELLED_QUEUES_MAX", 2)
    for number in range(5):
        http.put(f"{QUEUES}/q{number}")
        bodies = [{"body": "a"}] * (number + 1)
        http.post(f"{QUEUES}/q{number}/messages", json={"messages": bodies})
    found = samples(http)
    visible = {
        key[2]: value for key, value in found.items() if key[0] == "veilmq_queue_messages" and key[4] == "visible"
    }
    assert visible == {"q4": 5, "q3": 4, "": 6}
    assert found["veilmq_queues",] == 5


def test_what_an_account_set_is_no_queue_of_its_user(http: httpx.Client, server: Any) -> None:
    for name in SETTINGS_QUEUES:
        key = QueueKey("000000000000", "us-east-1", name)
        server.on_loop(server.shell.call(CreateQueue(queue=key, origin=SERVER, change={"labels": {"a": "b"}})))
    assert http.get("/api/v1/queues?account=*").json()["queues"] == []
    found = samples(http)
    assert found["veilmq_queues",] == 0
    assert not [key for key in found if key[0] == "veilmq_queue_messages"]


def test_commits_and_commands_are_counted(http: httpx.Client, server: Any) -> None:
    http.put(f"{QUEUES}/orders")
    before = samples(http)
    for _ in range(3):
        http.post(f"{QUEUES}/orders/messages", json={"messages": [{"body": "a"}, {"body": "b"}]})
    found = samples(http)
    assert found["veilmq_commands_total", "Send", "admin"] == 6
    assert found["veilmq_commit_seconds_count",] >= before["veilmq_commit_seconds_count",] + 3
    buckets = [value for key, value in found.items() if key[0] == "veilmq_commit_seconds_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1] == found["veilmq_commit_seconds_count",]
    assert found["veilmq_commit_seconds_sum",] > 0
    assert found["veilmq_wal_bytes",] > 0
    assert found["veilmq_disk_free_bytes",] > 0
    assert found["veilmq_disk_low",] == 0


def test_outcomes_of_leases_are_counted_once(http: httpx.Client) -> None:
    orders = f"{QUEUES}/orders"
    http.put(orders)
    http.post(orders + "/messages", json={"messages": [{"body": "a"}] * 5})
    messages = http.post(orders + "/receive", json={"count": 3}).json()["messages"]
    handles = [message["handle"] for message in messages]
    assert samples(http)["veilmq_lease_outcomes_total", "received"] == 3
    http.post(orders + "/receive", json={"count": 1})
    http.post(orders + "/extend", json={"handles": handles[:1], "lease_us": 60_000_000})
    http.post(orders + "/extend", json={"handles": handles[1:2], "lease_us": 0})
    http.post(orders + "/delete", json={"handles": handles[:1]})
    http.post(orders + "/delete", json={"handles": handles[:1]})
    for _ in range(2):
        found = samples(http)
        counts = {key[1]: value for key, value in found.items() if key[0] == "veilmq_lease_outcomes_total"}
        assert {name: count for name, count in counts.items() if count} == {
            "received": 4, "extended": 1, "released": 1, "deleted": 1, "delete_refused": 1,
        }  # fmt: skip


def test_what_was_before_the_start_is_not_counted(running: Any, tmp_path: Path) -> None:
    orders = f"{QUEUES}/orders"
    for _ in range(2):
        with running(tmp_path / "data") as server:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            with httpx.Client(base_url=server.url, headers=headers) as http:
                http.put(orders)
                http.post(orders + "/messages", json={"messages": [{"body": "a"}]})
                http.post(orders + "/receive")
                assert samples(http)["veilmq_lease_outcomes_total", "received"] == 1


def test_listeners_are_counted(http: httpx.Client, server: Any) -> None:
    host, port = server.listeners["sqs"].address
    with httpx.Client(base_url=f"http://{host}:{port}") as data:
        for _ in range(3):
            assert data.get("/").text == "hello"
        found = samples(http)
    assert found["veilmq_requests_total", "sqs"] == 3
    assert found["veilmq_connections", "sqs"] == 1
    assert found["veilmq_bytes_sent_total", "sqs"] > 0


def test_ready_says_what_is_wrong(http: httpx.Client, server: Any) -> None:
    assert http.get("/health/ready").status_code == 200
    server.shell.broken = StoreUnknown(reason="fsync failed")
    answer = http.get("/health/ready")
    server.shell.broken = None
    assert answer.status_code == 503
    assert answer.json() == {
        "ready": False,
        "reasons": {"store": "outcome unknown: fsync failed"},
        "warnings": {},
    }
    assert http.get("/health/live").status_code == 200


def test_a_mark_far_ahead_is_a_warning(running: Any, tmp_path: Path) -> None:
    def ahead(server: Any) -> None:
        server.clock.start(server.clock.now() + 3_600_000_000)

    with running(tmp_path / "data", prepare=ahead) as server:
        answer = httpx.get(server.url + "/health/ready")
        assert answer.status_code == 200
        assert "ahead" in answer.json()["warnings"]["clock"]


def test_pushes_that_ended_are_a_warning(http: httpx.Client, server: Any) -> None:
    server.push_fault = "the key cannot be had"
    answer = http.get("/health/ready")
    server.push_fault = None
    assert (answer.status_code, answer.json()["reasons"]) == (200, {})
    assert "the key cannot be had" in answer.json()["warnings"]["pushes"]
    assert http.get("/health/ready").json()["warnings"] == {}


def test_a_damaged_page_is_a_warning(http: httpx.Client, server: Any) -> None:
    server.store.readers.trusting = True
    answer, metrics = http.get("/health/ready"), http.get("/metrics").text
    server.store.readers.trusting = False
    assert (answer.status_code, answer.json()["reasons"]) == (200, {})
    assert "run `veilmq check`" in answer.json()["warnings"]["pages"]
    assert "veilmq_pages_damaged 1.0" in metrics
    assert http.get("/health/ready").json()["warnings"] == {}


def test_a_full_disk_and_a_file_that_is_gone_are_reasons(running: Any, tmp_path: Path) -> None:
    def low(server: Any) -> None:
        server.store._writer.refusal = DiskLow(free_bytes=5)

    with running(tmp_path / "data", prepare=low) as server:
        server.store._look_at_disk = lambda now: None
        server.store._writer.refusal = DiskLow(free_bytes=5)
        answer = httpx.get(server.url + "/health/ready")
        assert (answer.status_code, list(answer.json()["reasons"])) == (503, ["disk"])
        needed = server.store.directory.needed_bytes()
        assert f"refused until {needed} are" in answer.json()["reasons"]["disk"]

        server.store._writer.refusal = StoreFailed(reason="veilmq.db was deleted")
        answer, metrics = httpx.get(server.url + "/health/ready"), httpx.get(server.url + "/metrics").text
        assert answer.status_code == 503
        assert answer.json()["reasons"] == {"database": "veilmq.db was deleted: sends and creates are refused"}
        assert "veilmq_database_gone 1.0" in metrics
        assert "veilmq_disk_low 0.0" in metrics


def test_move_tasks_are_counted(http: httpx.Client, server: Any) -> None:
    http.put(f"{QUEUES}/dead")
    http.put(f"{QUEUES}/orders", json={"redrive": {"target": "dead", "receive_count_max": 1}})
    http.put(f"{QUEUES}/elsewhere")
    http.post(f"{QUEUES}/dead/messages", json={"messages": [{"body": "a"}, {"body": "b"}]})
    before = samples(http)
    assert {before["veilmq_move_tasks", status.value] for status in MoveStatus} == {0}
    dead, elsewhere = (QueueKey("000000000000", "us-east-1", name) for name in ("dead", "elsewhere"))
    server.on_loop(server.shell.call(StartMove(queue=dead, origin=SERVER, destination=elsewhere)))
    for _ in range(200):
        server.on_loop(server.shell.call(Sweep()))
        found = samples(http)
        if not found["veilmq_move_tasks", "running"]:
            break
    assert found["veilmq_move_tasks", "completed"] == 1
    assert found["veilmq_moved_messages_total",] == before["veilmq_moved_messages_total",] + 2
    assert found["veilmq_queue_messages", "000000000000", "elsewhere", "us-east-1", "visible"] == 2


def of_queues(http: httpx.Client) -> dict[tuple[str, str], float]:
    """(queue, event) -> count, but for zeros; an empty name is all further queues."""
    found = samples(http).items()
    return {(key[3], key[2]): value for key, value in found if key[0] == "veilmq_queue_events_total" and value}


def test_events_are_counted_by_queue(http: httpx.Client) -> None:
    orders = f"{QUEUES}/orders"
    http.put(f"{QUEUES}/dead")
    http.put(orders, json={"redrive": {"target": "dead", "receive_count_max": 1}})
    assert samples(http)["veilmq_queue_events_total", "000000000000", "sent", "orders", "us-east-1"] == 0
    http.post(orders + "/messages", json={"messages": [{"body": "a"}] * 3})
    http.post(f"{QUEUES}/dead/messages", json={"messages": [{"body": "b"}]})
    handles = [each["handle"] for each in http.post(orders + "/receive", json={"count": 3}).json()["messages"]]
    http.post(orders + "/delete", json={"handles": handles[:1]})
    http.post(orders + "/extend", json={"handles": handles[1:2], "lease_us": 0})
    http.post(orders + "/receive")  # which dead-letters the released one
    for _ in range(2):
        assert {key: count for key, count in of_queues(http).items() if key[0] != "dead"} == {
            ("orders", "sent"): 3, ("orders", "received"): 3, ("orders", "deleted"): 1, ("orders", "released"): 1,
            ("orders", "dead_lettered"): 1,
        }  # fmt: skip
        assert of_queues(http)["dead", "sent"] == 1


def test_queues_beyond_the_bound_share_one_count_that_never_goes_back(http: httpx.Client, monkeypatch: Any) -> None:
    monkeypatch.setattr(metrics, "QUEUES_MAX", 2)
    for number in range(4):
        http.put(f"{QUEUES}/q{number}")
        http.post(f"{QUEUES}/q{number}/messages", json={"messages": [{"body": "a"}]})
    assert of_queues(http) == {("q0", "sent"): 1, ("q1", "sent"): 1, ("", "sent"): 2}
    http.delete(f"{QUEUES}/q0")
    http.put(f"{QUEUES}/q4")
    http.post(f"{QUEUES}/q4/messages", json={"messages": [{"body": "a"}]})
    assert of_queues(http) == {("q1", "sent"): 1, ("", "sent"): 3}
    http.post(f"{QUEUES}/q4/messages", json={"messages": [{"body": "a"}]})
    assert of_queues(http) == {("q1", "sent"): 1, ("q4", "sent"): 1, ("", "sent"): 3}


def test_a_cluster_of_one_copy_is_a_warning(running: Any, tmp_path: Path) -> None:
    for cluster, warned in (("postgresql://there/veilmq", ["single_copy"]), (None, [])):
        settings = Settings(cluster=cluster, single_copy=True)
        with running(tmp_path / f"data-{len(warned)}", settings=settings) as server:
            ready = httpx.get(f"{server.url}/health/ready")
            assert (ready.status_code, list(ready.json()["warnings"])) == (200, warned)
