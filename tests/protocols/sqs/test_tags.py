"""Tags, through botocore on a real store, in both forms."""

from typing import Any

import msgspec
import pytest

from veilmq.model.settings.access import Action, Grant
from veilmq.protocols.sqs import limits
from veilmq.testing.for_each import for_each


@pytest.fixture
def url(client: Any) -> str:
    return str(client.create_queue(QueueName="jobs", tags={"team": "shop"})["QueueUrl"])


def tags(client: Any, url: str) -> dict[str, str]:
    found: dict[str, str] = client.list_queue_tags(QueueUrl=url).get("Tags", {})
    return found


def test_tags_are_added_replaced_removed_and_listed(client: Any, url: str) -> None:
    assert tags(client, url) == {"team": "shop"}
    client.tag_queue(QueueUrl=url, Tags={"team": "mail", "colour": "a/b = c+d @ é", "empty": ""})
    assert tags(client, url) == {"team": "mail", "colour": "a/b = c+d @ é", "empty": ""}
    client.tag_queue(QueueUrl=url, Tags={"Colour": "case counts"})
    client.untag_queue(QueueUrl=url, TagKeys=["team", "empty", "never there"])
    assert tags(client, url) == {"colour": "a/b = c+d @ é", "Colour": "case counts"}
    client.untag_queue(QueueUrl=url, TagKeys=["colour", "Colour"])
    assert tags(client, url) == {}
    assert "Tags" not in client.list_queue_tags(QueueUrl=url)


@for_each("given", [{"team": "mail"}, {"team": "shop", "more": "x"}, {"Team": "shop"}])
def test_a_queue_of_other_tags_is_another(served: Any, client: Any, url: str, given: dict[str, str]) -> None:
    """Also one that has none (Bogdanp/dramatiq_sqs #13, awslabs/amazon-sqs-java-temporary-queues-client #70)."""
    client.create_queue(QueueName="bare")
    for name in ("jobs", "bare"):
        refused = served.refused(client.create_queue, QueueName=name, tags=given)
        assert refused == ("QueueAlreadyExists", "A queue already exists with the same name and different tags")
    assert tags(client, url) == {"team": "shop"}


@for_each("given", [{}, {"tags": {}}, {"tags": {"team": "shop"}}])
def test_a_queue_is_met_again_by_its_tags_or_none(client: Any, url: str, given: dict[str, Any]) -> None:
    assert client.create_queue(QueueName="jobs", **given)["QueueUrl"] == url
    assert tags(client, url) == {"team": "shop"}


@for_each("count", [limits.TAGS_MAX - 1, limits.TAGS_MAX])
def test_as_many_tags_as_allowed(client: Any, url: str, count: int) -> None:
    client.tag_queue(QueueUrl=url, Tags={str(number): "x" for number in range(count - 1)})
    assert len(tags(client, url)) == count


def test_one_tag_too_many_changes_nothing(served: Any, client: Any, url: str) -> None:
    most = {str(number): "x" for number in range(limits.TAGS_MAX)}
    for given in (most, most | {"more": "x"}):
        code, text = served.refused(client.tag_queue, QueueUrl=url, Tags=given)
        assert (code, text) == ("InvalidParameterValue", "Too many tags added for queue jobs.")
    code, _ = served.refused(client.create_queue, QueueName="other", tags=most | {"more": "x"})
    assert code == "InvalidParameterValue"
    assert tags(client, url) == {"team": "shop"}
    client.tag_queue(QueueUrl=url, Tags={"team": "replaced"} | {str(number): "x" for number in range(49)})
    assert len(tags(client, url)) == limits.TAGS_MAX


@for_each(
    ("key", "value", "taken"),
    [
        ("", "v", False),
        ("k", "v", True),
        ("kk", "v", True),
        ("k" * 127, "v", True),
        ("k" * 128, "v", True),
        ("k" * 129, "v", False),
        ("k", "v" * 255, True),
        ("k", "v" * 256, True),
        ("k", "v" * 257, False),
        ("aws:made", "v", False),
        ("AWS:made", "v", False),
        ("aws", "v", True),
        ("k\x01", "v", False),
        ("k", "aws:made", False),
        ("k", "Aws:made", False),
        ("k", "aws", True),
        ("Größe 数", "_.:/=+-@ ½\t", True),
        *((f"k{each}", "v", False) for each in "&<>,;()'\"#%*\\|~^!?$\x1f\u200b\U0001f600"),
        *(("k", f"v{each}", False) for each in "&<,"),
    ],
)
def test_the_limits_of_a_tag(served: Any, client: Any, url: str, key: str, value: str, taken: bool) -> None:
    if taken:
        client.tag_queue(QueueUrl=url, Tags={key: value})
        assert tags(client, url)[key] == value
    else:
        code, _ = served.refused(client.tag_queue, QueueUrl=url, Tags={key: value})
        assert code in {"InvalidParameterValue", "InvalidMessageContents"}
    if taken:
        client.untag_queue(QueueUrl=url, TagKeys=[key])
    assert tags(client, url) == {"team": "shop"}


@pytest.mark.parametrize("count", [limits.TAGS_MAX - 1, limits.TAGS_MAX, limits.TAGS_MAX + 1])
def test_as_many_keys_are_taken_away_as_a_queue_may_have(served: Any, client: Any, url: str, count: int) -> None:
    given = {"QueueUrl": url, "TagKeys": ["team", *(str(number) for number in range(count - 1))]}
    if count <= limits.TAGS_MAX:
        client.untag_queue(**given)
    else:
        assert served.refused(client.untag_queue, **given)[0] == "InvalidParameterValue"
    assert tags(client, url) == ({} if count <= limits.TAGS_MAX else {"team": "shop"})


def test_what_is_missing_is_named(served: Any, client: Any, url: str) -> None:
    assert served.refused(client.tag_queue, QueueUrl=url, Tags={})[0] == "MissingParameter"
    for keys in ([], [""]):
        assert served.refused(client.untag_queue, QueueUrl=url, TagKeys=keys) == (
            "InvalidParameterValue",
            "Tag keys must be between 1 and 128 characters in length.",
        )
    nowhere = url.replace("jobs", "nowhere")
    for call, given in ((client.tag_queue, {"Tags": {"a": "b"}}), (client.list_queue_tags, {})):
        code, _ = served.refused(call, QueueUrl=nowhere, **given)
        assert code == "AWS.SimpleQueueService.NonExistentQueue"


def test_of_two_who_change_at_once_nobody_is_lost(served: Any, client: Any, url: str) -> None:
    """Between the look and the write of one, another writes."""
    apply, interfered = served.store.apply, []

    def interfering(commands: Any, now: Any) -> Any:
        wanted = {"tags": {"team": "shop", "mine": "1"}}
        if not interfered and any(getattr(command, "change", None) == wanted for command in commands):
            interfered.append(True)
            served.connect("json").tag_queue(QueueUrl=url, Tags={"theirs": "2"})
        return apply(commands, now)

    served.store.apply = interfering
    client.tag_queue(QueueUrl=url, Tags={"mine": "1"})
    assert interfered
    assert tags(client, url) == {"team": "shop", "theirs": "2", "mine": "1"}


def test_a_key_that_may_change_needs_no_other_grant(served: Any, client: Any, url: str) -> None:
    ring = served.codec._verifier._keyring
    key = ring.keys["AKIDEXAMPLE"]
    ring.keys[key.id] = msgspec.structs.replace(key, grants=(Grant(frozenset({Action.CHANGE_QUEUE})),))
    client.tag_queue(QueueUrl=url, Tags={"mine": "1"})
    assert "AccessDenied" in served.refused(client.list_queue_tags, QueueUrl=url)[0]
