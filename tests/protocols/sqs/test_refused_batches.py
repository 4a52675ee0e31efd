"""Batches of which every entry is refused: whether there is the queue, and the caller may, is told all the same."""

import json
from typing import Any

import msgspec
import pytest

from veilmq.model.settings.access import Action, Grant

MISSING = "AWS.SimpleQueueService.NonExistentQueue"
BATCHES: dict[str, tuple[str, Action, dict[str, Any], dict[str, Any]]] = {
    "send_message_batch": ("SendMessage", Action.SEND, {"MessageBody": ""}, {"MessageBody": "x"}),
    "delete_message_batch": ("DeleteMessage", Action.DELETE, {"ReceiptHandle": ""}, {"ReceiptHandle": "h"}),
    "change_message_visibility_batch": (
        "ChangeMessageVisibility",
        Action.EXTEND,
        {"ReceiptHandle": "h", "VisibilityTimeout": 43_201},
        {"ReceiptHandle": "h", "VisibilityTimeout": 1},
    ),
}


@pytest.fixture(params=BATCHES)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def wrong(method: str, *good: str) -> list[dict[str, Any]]:
    """Entries that are refused, and one that is not."""
    return [{"Id": "1", **BATCHES[method][2]}, *({"Id": each, **BATCHES[method][3]} for each in good)]


def refused(served: Any, client: Any, method: str, url: str) -> str:
    """The code, which is that of a batch with a good entry too."""
    call = getattr(client, method)
    code, text = served.refused(call, QueueUrl=url, Entries=wrong(method))
    assert served.refused(call, QueueUrl=url, Entries=wrong(method, "2")) == (code, text)
    return str(code)


def test_where_all_is_well_each_entry_is_told(client: Any, url: str, method: str) -> None:
    answer = getattr(client, method)(QueueUrl=url, Entries=wrong(method))
    assert [failure["Id"] for failure in answer["Failed"]] == ["1"]
    assert "Successful" not in answer


def test_a_queue_that_is_missing(served: Any, client: Any, url: str, method: str) -> None:
    assert refused(served, client, method, url + "2") == MISSING


def test_a_key_without_the_grant(served: Any, client: Any, url: str, method: str) -> None:
    _, action, _, _ = BATCHES[method]
    ring = served.codec._verifier._keyring
    key = ring.keys["AKIDEXAMPLE"]
    for grants in ((Grant(frozenset(Action) - {action}),), (Grant(frozenset({action}), ("other",)),)):
        ring.keys[key.id] = msgspec.structs.replace(key, grants=grants)
        assert refused(served, client, method, url).startswith("AccessDenied")
        assert refused(served, client, method, url + "2").startswith("AccessDenied")
    ring.keys[key.id] = msgspec.structs.replace(key, grants=(Grant(frozenset({action}), ("jobs",)),))
    assert getattr(client, method)(QueueUrl=url, Entries=wrong(method))["Failed"]


def policy(client: Any, url: str, effect: str, action: str) -> None:
    statement = {"Effect": effect, "Principal": "*", "Action": f"sqs:{action}", "Resource": "*"}
    client.set_queue_attributes(QueueUrl=url, Attributes={"Policy": json.dumps({"Statement": statement})})


def test_a_policy_that_denies(served: Any, client: Any, url: str, method: str) -> None:
    policy(client, url, "Deny", BATCHES[method][0])
    assert refused(served, client, method, url).startswith("AccessDenied")
    policy(client, url, "Deny", "PurgeQueue")
    assert getattr(client, method)(QueueUrl=url, Entries=wrong(method))["Failed"]


def test_a_queue_of_another_account(served: Any, client: Any, url: str, method: str) -> None:
    friend = served.connect(key=served.other)
    assert refused(served, friend, method, url).startswith("AccessDenied")
    assert refused(served, friend, method, url + "2").startswith("AccessDenied")
    policy(client, url, "Allow", BATCHES[method][0])
    assert getattr(friend, method)(QueueUrl=url, Entries=wrong(method))["Failed"]
    ring = served.codec._verifier._keyring
    key = ring.keys[served.other.id]
    ring.keys[key.id] = msgspec.structs.replace(key, grants=(Grant(frozenset({Action.RECEIVE})),))
    assert refused(served, friend, method, url).startswith("AccessDenied")


def test_a_kms_key_that_fails(served: Any) -> None:
    served.configure(kms_faults=(("alias/old", "disabled"),))
    client = served.connect()
    url = client.create_queue(QueueName="jobs", Attributes={"KmsMasterKeyId": "alias/old"})["QueueUrl"]
    assert refused(served, client, "send_message_batch", url) == "KMS.DisabledException"
