"""Dead-letter queues through botocore on a real store: sources, permissions to redrive, move tasks."""

import base64
import json
from typing import Any

import msgspec
import pytest

from veilmq.model.settings.access import Action, Grant
from veilmq.protocols.sqs import limits
from veilmq.testing.for_each import for_each

ACCOUNT = "111122223333"
MISSING = "ResourceNotFoundException"


def arn(name: str, account: str = ACCOUNT, region: str = "us-east-1") -> str:
    return f"arn:aws:sqs:{region}:{account}:{name}"


def create(client: Any, name: str, target: str | None = None, **attributes: str) -> str:
    if target is not None:
        attributes["RedrivePolicy"] = json.dumps({"deadLetterTargetArn": arn(target), "maxReceiveCount": 1})
    if name.endswith(".fifo"):
        attributes["FifoQueue"] = "true"
    return str(client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"])


def dead_letter(served: Any, client: Any, url: str, *bodies: str) -> None:
    """Send the messages and let them fail."""
    for body in bodies:
        client.send_message(QueueUrl=url, MessageBody=body)
        client.receive_message(QueueUrl=url, VisibilityTimeout=0)
        assert "Messages" not in client.receive_message(QueueUrl=url)


def received(client: Any, url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.receive_message(
        QueueUrl=url, MaxNumberOfMessages=10, MessageSystemAttributeNames=["All"]
    ).get("Messages", [])
    return found


def task(client: Any, source: str = "dead") -> dict[str, Any]:
    (found,) = client.list_message_move_tasks(SourceArn=arn(source))["Results"]
    return dict(found)


class TestSources:
    """ListDeadLetterSourceQueues."""

    def test_the_queues_whose_policy_names_it_page_by_page(self, client: Any) -> None:
        url = create(client, "dead")
        assert "queueUrls" not in client.list_dead_letter_source_queues(QueueUrl=url)
        names = [f"source-{number}" for number in range(5)]
        urls = [create(client, name, "dead") for name in names]
        create(client, "other")
        assert client.list_dead_letter_source_queues(QueueUrl=url)["queueUrls"] == urls
        pages: list[list[str]] = []
        given: dict[str, Any] = {}
        while True:
            page = client.list_dead_letter_source_queues(QueueUrl=url, MaxResults=2, **given)
            pages.append(page["queueUrls"])
            if "NextToken" not in page:
                break
            given = {"NextToken": page["NextToken"]}
        assert pages == [urls[:2], urls[2:4], urls[4:]]
        paginator = client.get_paginator("list_dead_letter_source_queues")
        found = [
            each
            for page in paginator.paginate(QueueUrl=url, PaginationConfig={"PageSize": 2})
            for each in page["queueUrls"]
        ]
        assert found == urls

    @for_each(
        ("given", "code"),
        [
            ({"MaxResults": 0}, "InvalidParameterValue"),
            ({"MaxResults": limits.LIST_QUEUES_MAX + 1}, "InvalidParameterValue"),
            ({"MaxResults": 2, "NextToken": "%%"}, "InvalidParameterValue"),
            ({"QueueUrl": f"http://127.0.0.1:9324/{ACCOUNT}/nowhere"}, "AWS.SimpleQueueService.NonExistentQueue"),
        ],
    )
    def test_what_is_wrong_is_refused(self, served: Any, client: Any, given: dict[str, Any], code: str) -> None:
        url = create(client, "dead")
        assert served.refused(client.list_dead_letter_source_queues, **{"QueueUrl": url} | given)[0] == code

    @for_each("count", [1, limits.LIST_QUEUES_MAX])
    def test_the_limits_of_a_page_are_taken(self, client: Any, count: int) -> None:
        url = create(client, "dead")
        assert client.list_dead_letter_source_queues(QueueUrl=url, MaxResults=count).get("queueUrls", []) == []


class TestRedriveAllowPolicy:
    """Who may name a queue as its dead-letter queue."""

    @for_each(
        ("policy", "taken"),
        [
            ({"redrivePermission": "allowAll"}, True),
            ({"redrivePermission": "denyAll"}, False),
            ({"redrivePermission": "byQueue", "sourceQueueArns": [arn("jobs")]}, True),
            ({"redrivePermission": "byQueue", "sourceQueueArns": [arn("other")]}, False),
        ],
        fresh="served",
    )
    def test_it_is_kept(self, served: Any, client: Any, policy: dict[str, Any], taken: bool) -> None:
        create(client, "dead", RedriveAllowPolicy=json.dumps(policy))
        url = create(client, "jobs")
        redrive = {"RedrivePolicy": json.dumps({"deadLetterTargetArn": arn("dead"), "maxReceiveCount": "3"})}
        if taken:
            client.set_queue_attributes(QueueUrl=url, Attributes=redrive)
            shown = client.get_queue_attributes(QueueUrl=url, AttributeNames=["RedrivePolicy"])["Attributes"]
            assert json.loads(shown["RedrivePolicy"]) == {"deadLetterTargetArn": arn("dead"), "maxReceiveCount": 3}
        else:
            code, text = served.refused(client.set_queue_attributes, QueueUrl=url, Attributes=redrive)
            assert (code, "does not allow" in text) == ("InvalidParameterValue", True)

    @for_each(("count", "taken"), [(9, True), (10, True), (11, False)])
    def test_it_names_at_most_ten_queues(self, served: Any, client: Any, count: int, taken: bool) -> None:
        url = create(client, "dead")
        policy = {"redrivePermission": "byQueue", "sourceQueueArns": [arn(f"s{number}") for number in range(count)]}
        given = {"RedriveAllowPolicy": json.dumps(policy)}
        if taken:
            client.set_queue_attributes(QueueUrl=url, Attributes=given)
            shown = client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
            assert json.loads(shown["RedriveAllowPolicy"]) == policy
        else:
            code, text = served.refused(client.set_queue_attributes, QueueUrl=url, Attributes=given)
            assert (code, "between 1 and 10 source queue ARNs" in text) == ("InvalidParameterValue", True)

    @for_each(("count", "taken"), [(0, False), (1, True), (2, True), (999, True), (1000, True), (1001, False)])
    def test_the_limits_of_the_receive_count(self, served: Any, client: Any, count: int, taken: bool) -> None:
        create(client, "dead")
        url = create(client, "jobs")
        given = {"RedrivePolicy": json.dumps({"deadLetterTargetArn": arn("dead"), "maxReceiveCount": count})}
        if taken:
            client.set_queue_attributes(QueueUrl=url, Attributes=given)
        else:
            code, text = served.refused(client.set_queue_attributes, QueueUrl=url, Attributes=given)
            assert (code, "maxReceiveCount" in text) == ("InvalidParameterValue", True)


@for_each("suffix", ["", ".fifo"])
def test_the_receive_count_goes_on_in_the_next_queue_until_the_message_is_moved_back(
    served: Any, client: Any, suffix: str
) -> None:
    """API Reference, ReceiveMessage: "the number of times a message has been received across all queues". What each
    queue's redrive policy counts are its own receives."""
    more = {"MessageGroupId": "g", "MessageDeduplicationId": "d"} if suffix else {}
    kind = {"FifoQueue": "true"} if suffix else {}

    def make(name: str, target: str = "", receives: int = 0) -> str:
        policy = {"deadLetterTargetArn": arn(target + suffix), "maxReceiveCount": receives}
        redrive = {"RedrivePolicy": json.dumps(policy)} if target else {}
        return str(client.create_queue(QueueName=name + suffix, Attributes=kind | redrive)["QueueUrl"])

    def counts(url: str, times: int) -> list[str]:
        found = []
        for _ in range(times):
            given = {"MessageSystemAttributeNames": ["ApproximateReceiveCount"], "VisibilityTimeout": 0}
            for message in client.receive_message(QueueUrl=url, **given).get("Messages", []):
                found.append(message["Attributes"]["ApproximateReceiveCount"])
        return found

    last = make("last")
    dead = make("dead", "last", 2)
    url = make("jobs", "dead", 3)
    client.send_message(QueueUrl=url, MessageBody="x", **more)
    assert counts(url, 4) == ["1", "2", "3"]
    assert counts(dead, 3) == ["4", "5"]
    assert counts(last, 1) == ["6"]
    client.start_message_move_task(SourceArn=arn("last" + suffix), DestinationArn=arn("jobs" + suffix))
    served.later(1)
    assert counts(url, 1) == ["1"]


class TestMoveTasks:
    """StartMessageMoveTask, CancelMessageMoveTask, ListMessageMoveTasks."""

    def test_back_to_the_source(self, served: Any, client: Any) -> None:
        create(client, "dead")
        url = create(client, "jobs", "dead")
        dead_letter(served, client, url, "1", "2", "3")
        started_ms = served.clock.now // 1_000
        # "If this field is left blank, the messages will be redriven back to their respective original source queues."
        handle = client.start_message_move_task(SourceArn=arn("dead"), DestinationArn="")["TaskHandle"]
        assert task(client) == {
            "TaskHandle": handle,
            "Status": "RUNNING",
            "SourceArn": arn("dead"),
            "ApproximateNumberOfMessagesMoved": 0,
            "ApproximateNumberOfMessagesToMove": 3,
            "StartedTimestamp": started_ms,
        }
        for _ in range(3):
            served.later(1)
        assert task(client) == {
            "Status": "COMPLETED",
            "SourceArn": arn("dead"),
            "ApproximateNumberOfMessagesMoved": 3,
            "ApproximateNumberOfMessagesToMove": 3,
            "StartedTimestamp": started_ms,
        }
        messages = received(client, url)
        assert [each["Body"] for each in messages] == ["1", "2", "3"]
        for each in messages:
            assert each["Attributes"]["ApproximateReceiveCount"] == "1"
            assert "DeadLetterQueueSourceArn" not in each["Attributes"]

    def test_to_a_destination_at_a_rate_and_cancelled(self, served: Any, client: Any) -> None:
        url = create(client, "dead")
        create(client, "jobs", "dead")
        target = create(client, "other")
        for number in range(6):
            client.send_message(QueueUrl=url, MessageBody=str(number))
        given = {"DestinationArn": arn("other"), "MaxNumberOfMessagesPerSecond": 1}
        handle = client.start_message_move_task(SourceArn=arn("dead"), **given)["TaskHandle"]
        code, text = served.refused(client.start_message_move_task, SourceArn=arn("dead"))
        assert code == "InvalidParameterValue"
        assert "There is already a task running" in text
        served.sweep()
        served.later(1)
        shown = task(client)
        assert given.items() < shown.items()
        assert (shown["Status"], shown["ApproximateNumberOfMessagesMoved"]) == ("RUNNING", 2)
        assert client.cancel_message_move_task(TaskHandle=handle)["ApproximateNumberOfMessagesMoved"] == 2
        assert task(client)["Status"] == "CANCELLING"
        assert "TaskHandle" not in task(client)
        served.later(5)
        assert task(client)["Status"] == "CANCELLED"
        assert [each["Body"] for each in received(client, target)] == ["0", "1"]
        code, _ = served.refused(client.cancel_message_move_task, TaskHandle=handle)
        assert code == "AWS.SimpleQueueService.UnsupportedOperation"

    def test_a_failure_has_its_reason(self, served: Any, client: Any) -> None:
        url = create(client, "dead")
        create(client, "jobs", "dead")
        client.send_message(QueueUrl=url, MessageBody="sent here")
        client.start_message_move_task(SourceArn=arn("dead"))
        served.later(1)
        shown = task(client)
        assert (shown["Status"], shown["FailureReason"]) == ("FAILED", "CouldNotDetermineMessageSource")

    def test_the_latest_are_listed_newest_first(self, served: Any, client: Any) -> None:
        create(client, "dead")
        create(client, "jobs", "dead")
        assert client.list_message_move_tasks(SourceArn=arn("dead")).get("Results", []) == []
        for _ in range(11):
            client.start_message_move_task(SourceArn=arn("dead"))
            served.later(1)
        listed = client.list_message_move_tasks(SourceArn=arn("dead"), MaxResults=10)["Results"]
        started = [each["StartedTimestamp"] for each in listed]
        assert len(started) == 10
        assert started == sorted(started, reverse=True)
        assert len(client.list_message_move_tasks(SourceArn=arn("dead"), MaxResults=9)["Results"]) == 9

    @for_each(
        ("given", "code", "text"),
        [
            ({"SourceArn": ""}, "MissingParameter", "SourceArn"),
            ({"SourceArn": "dead"}, "InvalidParameterValue", "SourceArn"),
            ({"SourceArn": arn("nowhere")}, MISSING, "SourceArn"),
            ({"SourceArn": arn("dead", region="eu-west-1")}, MISSING, "SourceArn"),
            ({"SourceArn": arn("dead", account="444455556666")}, "AccessDenied", "denied"),
            ({"SourceArn": arn("jobs")}, "InvalidParameterValue", "Dead Letter Queue"),
            ({"DestinationArn": arn("nowhere")}, MISSING, "DestinationArn"),
            ({"DestinationArn": arn("dead")}, "InvalidParameterValue", "DestinationArn"),
            ({"DestinationArn": arn("a.fifo")}, "InvalidParameterValue", "DestinationArn"),
            ({"DestinationArn": "x"}, "InvalidParameterValue", "DestinationArn"),
            ({"MaxNumberOfMessagesPerSecond": 0}, "InvalidParameterValue", "MaxNumberOfMessagesPerSecond"),
            ({"MaxNumberOfMessagesPerSecond": 501}, "InvalidParameterValue", "MaxNumberOfMessagesPerSecond"),
        ],
    )
    def test_what_cannot_begin_is_refused(
        self, served: Any, client: Any, given: dict[str, Any], code: str, text: str
    ) -> None:
        for name, target in (("dead", None), ("jobs", "dead"), ("a.fifo", None)):
            create(client, name, target)
        found = served.refused(client.start_message_move_task, **{"SourceArn": arn("dead")} | given)
        assert found[0].startswith(code)
        assert text in found[1]
        assert client.list_message_move_tasks(SourceArn=arn("dead")).get("Results", []) == []

    @pytest.mark.parametrize("rate", [1, 2, 499, 500])
    def test_the_limits_of_the_rate_are_taken(self, client: Any, rate: int) -> None:
        create(client, "dead")
        create(client, "jobs", "dead")
        client.start_message_move_task(SourceArn=arn("dead"), MaxNumberOfMessagesPerSecond=rate)
        assert task(client)["MaxNumberOfMessagesPerSecond"] == rate

    def test_handles_that_are_none_are_refused(self, served: Any, client: Any) -> None:
        create(client, "dead")
        create(client, "jobs", "dead")
        handle = client.start_message_move_task(SourceArn=arn("dead"))["TaskHandle"]
        inside = json.loads(base64.b64decode(handle))
        assert inside["sourceArn"] == arn("dead")

        def made(**changes: str) -> str:
            return base64.b64encode(json.dumps(inside | changes).encode()).decode()

        for given, code in (
            ("", "MissingParameter"),
            ("nonsense", "InvalidParameterValue"),
            (made(sourceArn="x"), "InvalidParameterValue"),
            (made(taskId="x"), "InvalidParameterValue"),
            (made(taskId="0" * 8 + inside["taskId"][8:]), MISSING),
            (made(sourceArn=arn("jobs")), MISSING),
            (made(sourceArn=arn("nowhere")), MISSING),
            (made(sourceArn=arn("dead", account="444455556666")), "AccessDenied"),
        ):
            assert served.refused(client.cancel_message_move_task, TaskHandle=given)[0].startswith(code), given
        assert task(client)["Status"] == "RUNNING"
        for count in (0, 11):
            found = served.refused(client.list_message_move_tasks, SourceArn=arn("dead"), MaxResults=count)
            assert found[0] == "InvalidParameterValue"
        assert served.refused(client.list_message_move_tasks, SourceArn=arn("nowhere"))[0] == MISSING

    def test_an_account_has_at_most_100_tasks_under_way(self, served: Any, client: Any) -> None:
        """Developer Guide, "Configuring a dead-letter queue redrive"."""
        for number in range(101):
            create(client, f"dead-{number}")
            create(client, f"jobs-{number}", f"dead-{number}")
        handles = [
            client.start_message_move_task(SourceArn=arn(f"dead-{number}"))["TaskHandle"] for number in range(100)
        ]
        found = served.refused(client.start_message_move_task, SourceArn=arn("dead-100"))
        assert found == (
            "OverLimit",
            "The maximum number of active message movement tasks of an account is reached: 100.",
        )
        assert client.list_message_move_tasks(SourceArn=arn("dead-100")).get("Results", []) == []
        client.cancel_message_move_task(TaskHandle=handles[0])
        served.sweep()
        client.start_message_move_task(SourceArn=arn("dead-100"))

    def test_a_key_needs_to_move_and_for_a_destination_to_send(self, served: Any, client: Any) -> None:
        create(client, "dead")
        create(client, "jobs", "dead")
        create(client, "other")
        ring = served.codec._verifier._keyring
        key = ring.keys["AKIDEXAMPLE"]

        def grant(*grants: Grant) -> None:
            ring.keys[key.id] = msgspec.structs.replace(key, grants=grants)

        move = Grant(frozenset({Action.MOVE}), ("dead",))
        given = {"SourceArn": arn("dead"), "DestinationArn": arn("other")}
        for grants in (
            (Grant(frozenset(Action) - {Action.MOVE}),),
            (move,),
            (move, Grant(frozenset({Action.SEND}), ("jobs",))),
        ):
            grant(*grants)
            assert "AccessDenied" in served.refused(client.start_message_move_task, **given)[0]
        grant(move, Grant(frozenset({Action.SEND}), ("other",)))
        handle = client.start_message_move_task(**given)["TaskHandle"]
        assert "AccessDenied" in served.refused(client.list_message_move_tasks, SourceArn=arn("dead"))[0]
        client.cancel_message_move_task(TaskHandle=handle)

    def test_a_key_lets_dead_letters_go_only_where_it_may_send_or_to_its_own(self, served: Any, client: Any) -> None:
        for name in ("mine-dead", "pay"):
            create(client, name)
        ring = served.codec._verifier._keyring
        key = ring.keys["AKIDEXAMPLE"]
        own = Grant(frozenset({Action.CREATE_QUEUE, Action.CHANGE_QUEUE}), ("mine*",))
        ring.keys[key.id] = msgspec.structs.replace(key, grants=(own,))

        def policy(target: str) -> dict[str, str]:
            return {"RedrivePolicy": json.dumps({"deadLetterTargetArn": arn(target), "maxReceiveCount": 1})}

        asked = {"QueueName": "mine", "Attributes": policy("pay")}
        assert "AccessDenied" in served.refused(client.create_queue, **asked)[0]
        url = client.create_queue(QueueName="mine")["QueueUrl"]
        asked = {"QueueUrl": url, "Attributes": policy("pay")}
        assert "AccessDenied" in served.refused(client.set_queue_attributes, **asked)[0]
        client.set_queue_attributes(QueueUrl=url, Attributes=policy("mine-dead"))
        client.set_queue_attributes(QueueUrl=url, Attributes={"RedrivePolicy": ""})
        ring.keys[key.id] = msgspec.structs.replace(key, grants=(own, Grant(frozenset({Action.SEND}), ("pay",))))
        client.set_queue_attributes(QueueUrl=url, Attributes=policy("pay"))


def test_receive_counts_across_dead_letters(served: Any, client: Any) -> None:
    """docs/sqs.md: a dead letter counts on, a redriven message begins anew."""
    dead, source = create(client, "dead"), create(client, "source", "dead")
    dead_letter(served, client, source, "x")

    def counts(url: str) -> list[str]:
        asked = {"MessageSystemAttributeNames": ["ApproximateReceiveCount"], "VisibilityTimeout": 0}
        found = client.receive_message(QueueUrl=url, **asked).get("Messages", [])
        return [each["Attributes"]["ApproximateReceiveCount"] for each in found]

    assert [counts(dead), counts(dead)] == [["2"], ["3"]]
    client.start_message_move_task(SourceArn=arn("dead"))
    served.sweep()
    assert counts(source) == ["1"]
    assert counts(source) == [], "the policy counts the receives in its own queue"
    assert counts(dead) == ["2"]
