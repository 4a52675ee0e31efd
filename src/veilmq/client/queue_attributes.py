"""A `Template` as the attributes of SQS's CreateQueue, for the adapters that create queues with it.

Strategy: one pure function; whole seconds, as in SQS. The service checks the ranges. Source: CreateQueue in the SQS API
Reference.
"""

import json
from typing import Final

from veilmq.client.messages import Template
from veilmq.model.errors import ParameterInvalid

FIFO_SUFFIX: Final = ".fifo"

_SECONDS: Final = {
    "visibility_timeout": "VisibilityTimeout",
    "delay": "DelaySeconds",
    "retention": "MessageRetentionPeriod",
    "wait": "ReceiveMessageWaitTimeSeconds",
}


def creation_attributes(name: str, template: Template, dead_letter_arn: str | None) -> dict[str, str]:
    """Attributes of the queue to create. `dead_letter_arn`: of the template's dead-letter queue, if it names one.

    Raises ParameterInvalid naming the template's field.
    """
    attributes = {}
    for field, attribute in _SECONDS.items():
        value = getattr(template, field)
        if value is not None:
            if value != int(value):
                raise ParameterInvalid(parameter=field, reason=f"must be whole seconds here, not {value}")
            attributes[attribute] = str(int(value))
    if template.message_bytes_max is not None:
        attributes["MaximumMessageSize"] = str(template.message_bytes_max)
    if template.fifo and not name.endswith(FIFO_SUFFIX):
        raise ParameterInvalid(parameter="name", reason=f"a FIFO queue's name must end in {FIFO_SUFFIX}: {name}")
    if name.endswith(FIFO_SUFFIX):
        attributes["FifoQueue"] = "true"
    if template.content_deduplication:
        if not name.endswith(FIFO_SUFFIX):
            raise ParameterInvalid(parameter="content_deduplication", reason="only a FIFO queue deduplicates")
        attributes["ContentBasedDeduplication"] = "true"
    attributes |= _redrive(template, dead_letter_arn)
    return attributes


def _redrive(template: Template, dead_letter_arn: str | None) -> dict[str, str]:
    if (template.dead_letter_queue is None) is not (template.receive_count_max is None):
        lacking = "dead_letter_queue" if template.dead_letter_queue is None else "receive_count_max"
        raise ParameterInvalid(parameter=lacking, reason="dead_letter_queue and receive_count_max need each other")
    if dead_letter_arn is None:
        return {}
    policy = {"deadLetterTargetArn": dead_letter_arn, "maxReceiveCount": template.receive_count_max}
    return {"RedrivePolicy": json.dumps(policy)}
