"""Words of AWS that only a store's answer brings forth: programs match on them. Through clients of both forms."""

import json
from base64 import b64encode
from typing import Any

NOWHERE = "arn:aws:sqs:us-east-1:111122223333:nowhere"
DEAD = "arn:aws:sqs:us-east-1:111122223333:dead"


def create(client: Any, name: str, **attributes: str) -> str:
    return str(client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"])


def test_a_handle_of_another_queue_and_one_that_is_none(served: Any, client: Any) -> None:
    url, other = create(client, "jobs"), create(client, "other")
    client.send_message(QueueUrl=url, MessageBody="x")
    (message,) = client.receive_message(QueueUrl=url)["Messages"]
    handle = message["ReceiptHandle"]
    flipped = handle[:-1] + ("0" if handle[-1] != "0" else "1")
    for queue, given, words in (
        (other, handle, f'The receipt handle "{handle}" is not valid for this queue.'),
        (url, flipped, f'The input receipt handle "{flipped}" is not a valid receipt handle.'),
        (url, "x", 'The input receipt handle "x" is not a valid receipt handle.'),
    ):
        found = served.refused(client.delete_message, QueueUrl=queue, ReceiptHandle=given)
        assert found == ("ReceiptHandleIsInvalid", words)
        found = served.refused(
            client.change_message_visibility, QueueUrl=queue, ReceiptHandle=given, VisibilityTimeout=1
        )
        assert found == ("ReceiptHandleIsInvalid", "The input receipt handle is invalid.")
        failed = client.delete_message_batch(QueueUrl=queue, Entries=[{"Id": "1", "ReceiptHandle": given}])["Failed"]
        assert [(each["Code"], each["Message"]) for each in failed] == [("ReceiptHandleIsInvalid", words)]
    client.delete_message(QueueUrl=url, ReceiptHandle=handle)


def test_a_dead_letter_target_that_is_none(served: Any, client: Any) -> None:
    url = create(client, "jobs")
    policy = json.dumps({"maxReceiveCount": "3", "deadLetterTargetArn": NOWHERE})
    words = f"Value {policy} for parameter RedrivePolicy is invalid. Reason: Dead letter target does not exist."
    for call, where in ((client.set_queue_attributes, {"QueueUrl": url}), (client.create_queue, {"QueueName": "new"})):
        found = served.refused(call, **where, Attributes={"RedrivePolicy": policy})
        assert found == ("InvalidParameterValue", words)


def test_move_tasks_that_cannot_begin(served: Any, client: Any) -> None:
    form = "arn:<partition>:<service>:<region>:<account-id>:<resource-id>"
    found = served.refused(client.start_message_move_task, SourceArn="jobs")
    assert found == ("InvalidParameterValue", f"You must use this format to specify the SourceArn: {form}")
    create(client, "dead")
    found = served.refused(client.start_message_move_task, SourceArn=DEAD)
    assert found == ("InvalidParameterValue", "Source queue must be configured as a Dead Letter Queue.")
    create(client, "jobs", RedrivePolicy=json.dumps({"deadLetterTargetArn": DEAD, "maxReceiveCount": 1}))
    client.start_message_move_task(SourceArn=DEAD)
    found = served.refused(client.start_message_move_task, SourceArn=DEAD)
    words = "There is already a task running. Only one active task is allowed for a source queue arn at a given time."
    assert found == ("InvalidParameterValue", words)


def test_two_kinds_of_encryption(served: Any, client: Any) -> None:
    both = {"KmsMasterKeyId": "alias/mine", "SqsManagedSseEnabled": "true"}
    words = (
        "You can use one type of server-side encryption (SSE) at one time. You can either enable KMS SSE or SQS SSE."
    )
    assert served.refused(client.create_queue, QueueName="jobs", Attributes=both) == ("InvalidAttributeValue", words)
    url = create(client, "jobs")
    found = served.refused(client.set_queue_attributes, QueueUrl=url, Attributes=both)
    assert found == ("InvalidAttributeName", words)


def test_move_tasks_that_cannot_be_cancelled(served: Any, client: Any) -> None:
    words = "Value for parameter TaskHandle is invalid."
    for wrong in ("jobs", "e30=", task_handle("jobs")):
        found = served.refused(client.cancel_message_move_task, TaskHandle=wrong)
        assert found == ("InvalidParameterValue", words)
    words = "The resource that you specified for the SourceArn parameter doesn't exist."
    for source in (NOWHERE, NOWHERE.replace("us-east-1", "eu-west-1")):
        found = served.refused(client.cancel_message_move_task, TaskHandle=task_handle(source))
        assert found == ("ResourceNotFoundException", words)
    create(client, "dead")
    found = served.refused(client.cancel_message_move_task, TaskHandle=task_handle(DEAD))
    assert found == ("ResourceNotFoundException", "Task does not exist.")


def task_handle(source: str) -> str:
    """Of a task that there never was."""
    inside = {"taskId": "00010203-0405-4607-8809-0a0b0c0d0e0f", "sourceArn": source}
    return b64encode(json.dumps(inside).encode()).decode()


def test_an_attempt_id_whose_message_was_deleted(served: Any, client: Any) -> None:
    url = create(client, "jobs.fifo", FifoQueue="true", ContentBasedDeduplication="true")
    for group in "ab":
        client.send_message(QueueUrl=url, MessageBody=group, MessageGroupId=group)
    (message,) = client.receive_message(QueueUrl=url, ReceiveRequestAttemptId="try")["Messages"]
    client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    found = served.refused(client.receive_message, QueueUrl=url, ReceiveRequestAttemptId="try")
    reason = "The receiveRequestAttemptId is not valid anymore since the receive call is not retryable."
    # awslabs/amazon-sqs-java-messaging-lib #101
    words = f"Value try for parameter ReceiveRequestAttemptId is invalid. Reason: {reason}"
    assert found == ("InvalidParameterValue", words)
    assert [each["Body"] for each in client.receive_message(QueueUrl=url)["Messages"]] == ["b"]
