"""TagQueue, UntagQueue, ListQueueTags, and the rules for tags.

Strategy: a queue's tags are one setting; adding and removing are edits of it. Source: "Amazon SQS cost allocation tags"
in the SQS Developer Guide; TagQueue in the SQS API Reference.
"""

from collections.abc import Sequence
from typing import Final

from veilmq.model.commands import DescribeQueue
from veilmq.model.outcomes import Outcome, QueueDescribed
from veilmq.model.queue import QueueInfo, SettingsChange
from veilmq.protocols.sqs import limits, results
from veilmq.protocols.sqs.call import Asked, Call, Plan, sole
from veilmq.protocols.sqs.errors import INVALID_PARAMETER_VALUE, Refusal, invalid_value, missing
from veilmq.protocols.sqs.inputs import QueueInput, TagQueueInput, UntagQueueInput
from veilmq.protocols.sqs.message_attributes import check_text
from veilmq.protocols.sqs.operations.editing import plan_edit

_KEY_LENGTH: Final = f"Tag keys must be between 1 and {limits.TAG_KEY_CHARACTERS_MAX} characters in length."
_VALUE_LENGTH: Final = f"Tag values must be between 0 and {limits.TAG_VALUE_CHARACTERS_MAX} characters in length."
_CHARACTERS: Final = "may only contain unicode letters, digits, white space, or one of these symbols: _ . : / = + - @"


def check_tags(tags: dict[str, str], queue: str) -> dict[str, str]:
    """Check the tags of a queue. Raises Refusal."""
    if len(tags) > limits.TAGS_MAX:
        raise _too_many(queue)
    for key, value in tags.items():
        _check_key(key)
        if len(value) > limits.TAG_VALUE_CHARACTERS_MAX:
            raise Refusal(INVALID_PARAMETER_VALUE, _VALUE_LENGTH)
        _check_characters("TagValue", "values", value)
    return tags


def _check_key(key: str) -> None:
    if not 1 <= len(key) <= limits.TAG_KEY_CHARACTERS_MAX:
        raise Refusal(INVALID_PARAMETER_VALUE, _KEY_LENGTH)
    _check_characters("TagKey", "keys", key)


def _check_characters(parameter: str, what: str, text: str) -> None:
    """Developer Guide, "Amazon SQS standard queue quotas" (queue tag)."""
    if text.lower().startswith(limits.TAG_RESERVED):
        raise invalid_value(parameter, text, f"Must not begin with {limits.TAG_RESERVED}")
    if not all(each.isalnum() or each.isspace() or each in limits.TAG_SYMBOLS for each in text):
        raise Refusal(INVALID_PARAMETER_VALUE, f"Tag {what} {_CHARACTERS}")
    check_text(text, f"queue tag {what}")


def _too_many(queue: str) -> Refusal:
    return Refusal(INVALID_PARAMETER_VALUE, f"Too many tags added for queue {queue}.")


def plan_tag(asked: Asked, given: TagQueueInput) -> Plan:
    """TagQueue."""
    tags = given.tags if given.tags is not None else given.query_tags
    if not tags:
        raise missing("Tags")
    added = check_tags(tags, asked.queue(given.queue_url).name)

    def edit(info: QueueInfo) -> SettingsChange:
        present = info.settings.tags
        merged = present | added
        if len(merged) > limits.TAGS_MAX:
            raise _too_many(info.key.name)
        return {} if merged == present else {"tags": merged}

    return plan_edit(asked, given.queue_url, edit)


def plan_untag(asked: Asked, given: UntagQueueInput) -> Plan:
    """UntagQueue; an unknown key is no error."""
    if given.tag_keys is None:
        raise missing("TagKeys")
    if not given.tag_keys or not all(given.tag_keys):  # AWS's answer to an empty list: getmoto/moto #1686
        raise Refusal(INVALID_PARAMETER_VALUE, _KEY_LENGTH)
    if len(given.tag_keys) > limits.TAGS_MAX:
        reason = f"A queue has at most {limits.TAGS_MAX} tags."
        raise invalid_value("TagKeys", len(given.tag_keys), reason)
    removed = frozenset(given.tag_keys)

    def edit(info: QueueInfo) -> SettingsChange:
        left = {key: value for key, value in info.settings.tags.items() if key not in removed}
        return {} if left == info.settings.tags else {"tags": left}

    return plan_edit(asked, given.queue_url, edit)


def plan_list_tags(asked: Asked, given: QueueInput) -> Plan:
    """ListQueueTags."""
    return (DescribeQueue(queue=asked.queue(given.queue_url), origin=asked.caller.origin),), None


def answer_list_tags(call: Call, outcomes: Sequence[Outcome]) -> results.ListQueueTagsResult:
    """ListQueueTagsResult."""
    described: QueueDescribed = sole(call, outcomes)
    return results.ListQueueTagsResult(described.info.settings.tags or None)
