"""CreateQueue of a queue that is there: values that mean the same are the same, in whatever words they were stored."""

import json
from typing import Any

import msgspec

from veilmq.model.commands import ChangeQueue, DeleteQueue, DescribeQueue, Origin
from veilmq.model.settings.access import Action, Grant
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols.sqs.attributes import spelled_as
from veilmq.protocols.sqs.errors import LABEL_PREFIX
from veilmq.testing.for_each import for_each

QUEUE = QueueKey("111122223333", "us-east-1", "jobs")
STATEMENT = {"Effect": "Allow", "Principal": "*", "Action": "sqs:SendMessage", "Resource": "*"}
POLICY = json.dumps({"Statement": [STATEMENT]}, indent=2)
OTHER = json.dumps({"Statement": [{**STATEMENT, "Action": "sqs:ReceiveMessage"}]})
SAME = [
    json.dumps({"Statement": [STATEMENT]}),
    json.dumps({"Statement": [dict(reversed(STATEMENT.items()))], "Version": "2008-10-17"}, separators=(",", ":")),
]
DIFFERENT = [OTHER, json.dumps({"Version": "2012-10-17", "Statement": [STATEMENT]}), ""]


def met(client: Any, **attributes: str) -> Any:
    """The URL that CreateQueue answers."""
    return client.create_queue(QueueName="jobs", Attributes=attributes)["QueueUrl"]


def store(served: Any, **labels: str) -> None:
    """Keep these labels, as a server of before may have written them."""
    change = {"labels": {LABEL_PREFIX + name: text for name, text in labels.items()}}
    served.store.apply([ChangeQueue(queue=QUEUE, origin=Origin("test", "test"), change=change)], served.clock.now)
    served.store.commit()


def refused(served: Any, client: Any, **attributes: str) -> str:
    """The attribute that is said to differ."""
    code, text = served.refused(client.create_queue, QueueName="jobs", Attributes=attributes)
    assert code == "QueueAlreadyExists"
    return str(text).rpartition(" ")[2]


def test_all_that_get_queue_attributes_shows_is_the_same_queue(client: Any) -> None:
    url = met(client, Policy=POLICY, VisibilityTimeout="40", KmsMasterKeyId="alias/mine")
    shown = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    settable = {
        name: text
        for name, text in shown.items()
        if name not in {"QueueArn", "CreatedTimestamp", "LastModifiedTimestamp"} and not name.startswith("Approx")
    }
    assert settable["Policy"] != POLICY
    assert met(client, **settable) == url


@for_each("policy", SAME)
def test_a_policy_in_other_words_is_the_same(served: Any, client: Any, policy: str) -> None:
    url = met(client, Policy=POLICY)
    assert met(client, Policy=policy) == url
    assert served.store.reader.queues[QUEUE].settings.labels == {LABEL_PREFIX + "Policy": POLICY}


def test_a_key_that_may_create_and_nothing_else(served: Any, client: Any) -> None:
    url = met(client, Policy=POLICY)
    ring = served.codec._verifier._keyring
    key = ring.keys["AKIDEXAMPLE"]
    ring.keys[key.id] = msgspec.structs.replace(key, grants=(Grant(frozenset({Action.CREATE_QUEUE})),))
    assert met(client, Policy=SAME[0]) == url
    assert refused(served, client, Policy=OTHER) == "Policy"


@for_each("policy", DIFFERENT)
def test_another_policy_is_refused(served: Any, client: Any, policy: str) -> None:
    met(client, Policy=POLICY)
    assert refused(served, client, Policy=policy) == "Policy"
    assert refused(served, client, Policy=SAME[0], KmsMasterKeyId="alias/mine") == "KmsMasterKeyId"
    assert refused(served, client, Policy=SAME[0], DelaySeconds="1") == "DelaySeconds"


def test_a_policy_of_before_its_form_was_checked_is_no_other(served: Any, client: Any) -> None:
    met(client)
    store(served, Policy="everybody")
    assert refused(served, client, Policy=POLICY) == "Policy"


def test_a_condition_of_true_is_not_one_of_1() -> None:
    def policy(value: object) -> str:
        condition = {"Bool": {"aws:SecureTransport": value}}
        return json.dumps({"Statement": {**STATEMENT, "Condition": condition}})

    name = LABEL_PREFIX + "Policy"
    assert spelled_as({name: policy(True)}, {name: policy(1)}) == {name: policy(True)}
    assert spelled_as({name: policy(True)}, {name: policy(True) + " "}) == {name: policy(True) + " "}


@for_each("key", [{}, {"KmsMasterKeyId": "alias/mine"}], fresh="served")
@for_each("period", ["300", "0300"], fresh="served")
def test_the_default_reuse_period_spelled_out_is_the_same(
    served: Any, client: Any, key: dict[str, str], period: str
) -> None:
    url = met(client, **key)
    spelled = {"KmsDataKeyReusePeriodSeconds": period}
    assert met(client, **spelled) == url
    assert met(client, **key, **spelled) == url
    store(served, KmsDataKeyReusePeriodSeconds="300")
    assert met(client, **spelled) == url
    store(served, KmsDataKeyReusePeriodSeconds="0600")
    assert met(client, KmsDataKeyReusePeriodSeconds="600") == url
    assert refused(served, client, **spelled) == "KmsDataKeyReusePeriodSeconds"


def test_setting_the_default_reuse_period_is_going_back_to_it(client: Any) -> None:
    url = met(client, KmsMasterKeyId="alias/mine", KmsDataKeyReusePeriodSeconds="600")
    client.set_queue_attributes(QueueUrl=url, Attributes={"KmsDataKeyReusePeriodSeconds": "300"})
    shown = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert shown["KmsDataKeyReusePeriodSeconds"] == "300"


def test_the_sources_of_a_redrive_allow_policy_are_a_set(served: Any, client: Any) -> None:
    def policy(*names: str) -> str:
        arns = [f"arn:aws:sqs:us-east-1:111122223333:{name}" for name in names]
        return json.dumps({"redrivePermission": "byQueue", "sourceQueueArns": arns})

    url = met(client, RedriveAllowPolicy=policy("a", "b"))
    assert met(client, RedriveAllowPolicy=policy("b", "a")) == url
    assert met(client, RedriveAllowPolicy=policy("b", "a", "b")) == url
    for other in (policy("a"), policy("a", "b", "c"), '{"redrivePermission":"denyAll"}', "", _ALLOW_ALL):
        assert refused(served, client, RedriveAllowPolicy=other) == "RedriveAllowPolicy"


_ALLOW_ALL = '{"redrivePermission":"allowAll"}'


class Vanishing:
    """A store from which the queue goes between a CreateQueue and the question how it words its labels."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.commit = store.commit

    def apply(self, commands: Any, now: Any) -> Any:
        if isinstance(commands[0], DescribeQueue):
            self._store.apply([DeleteQueue(queue=QUEUE, origin=Origin("test", "test"))], now)
            self._store.commit()
        return self._store.apply(commands, now)


def test_a_queue_that_is_deleted_meanwhile(served: Any, client: Any) -> None:
    met(client, Policy=POLICY)
    store, served.store = served.store, Vanishing(served.store)
    assert refused(served, client, Policy=SAME[0]) == "Policy"
    served.store = store
