"""Shows queues and messages at the admin port, as dictionaries of plain values.

Strategy: the engine's own units under the engine's own names (`_us`, `_bytes`; instants are microseconds since 1970),
so that nothing is lost. An instant that never comes is null. Ids of messages are UUIDs, as in the history and as
clients get them.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from veilmq.model.errors import VeilError
from veilmq.model.events import HeldMessage
from veilmq.model.instant import FOREVER
from veilmq.model.messages import Delivery, Extras, id_text
from veilmq.model.moves import MoveInfo
from veilmq.model.outcomes import ClockChecked, Outcome, Sent
from veilmq.model.settings.queue import QueueCounts, QueueInfo, QueueKey, QueueSettings
from veilmq.model.settings.topic import LiveSubscription, LiveTopic, hidden_queue

if TYPE_CHECKING:
    from veilmq.server.service import PushRoom
    from veilmq.store import Reader


_OUR_CLIENT: Final = re.compile(r"veilmq/\S+ \((?:(?P<host>[\w.-]+); pid (?P<process>\d{1,10})|(?P<name>[^()]+))\)")
"""In a client name (veilmq.client.adapters.cloud)."""


def shown_key(key: QueueKey) -> dict[str, str]:
    """Account, region and name."""
    return {"account": key.account, "region": key.region, "name": key.name}


def shown_client(protocol: str, principal: str, client: str) -> dict[str, Any]:
    """Who sent a command: its protocol, access key and client name, and what our clients put into that name: `host` and
    `process`, or the `name` that the program set. What is not known is null."""
    found = _OUR_CLIENT.search(client)
    host, process, name = (None, None, None) if found is None else found.group("host", "process", "name")
    return {
        "protocol": protocol,
        "principal": principal,
        "client": client,
        "host": host,
        "process": None if process is None else int(process),
        "name": name,
    }


def shown_clock(outcome: Outcome) -> dict[str, int]:
    """The step that was accepted, and how far the expiry clock is still held back. Raises VeilError."""
    if isinstance(outcome, VeilError):
        raise outcome
    assert isinstance(outcome, ClockChecked)
    return {"accepted_us": outcome.accepted_us, "held_us": outcome.held_us}


def shown_settings(settings: QueueSettings) -> dict[str, Any]:
    """All settings, by their names."""
    return msgspec.to_builtins(settings)  # type: ignore[no-any-return]


def shown_counts(counts: QueueCounts) -> dict[str, int]:
    """Messages by state, and their total."""
    return {
        "visible": counts.visible,
        "delayed": counts.delayed,
        "in_flight": counts.in_flight,
        "total": counts.total,
    }


def shown_listed(info: QueueInfo, oldest_us: int | None) -> dict[str, Any]:
    """A queue of a list; oldest_us: the age of its oldest message that is visible or in flight."""
    return shown_queue(info) | {"oldest_age_us": oldest_us}


def shown_queue(info: QueueInfo) -> dict[str, Any]:
    """A queue with settings and counts."""
    return shown_key(info.key) | {
        "incarnation": info.incarnation,
        "created": info.created,
        "modified": info.modified,
        "purged": info.purged,
        "version": info.version,
        "settings": shown_settings(info.settings),
        "counts": shown_counts(info.counts),
        "plan": msgspec.to_builtins(info.plan),
    }


def shown_instant(instant: int | None) -> int | None:
    """The instant, or None for one that never comes."""
    return None if instant is None or instant >= FOREVER else instant


def shown_extras(extras: Extras) -> dict[str, Any]:
    """Group, type, attributes and last failure, as far as the message has them. A Binary attribute is base64."""
    shown: dict[str, Any] = {
        "group": extras.group,
        "deduplication_id": extras.deduplication_id,
        "type": extras.type,
        "trace": extras.trace,
        "tag": extras.tag,
    }
    shown = {name: value for name, value in shown.items() if value is not None}
    if extras.error_type or extras.error:
        shown["last_error"] = {"type": extras.error_type, "text": extras.error}
    if extras.attributes:
        shown["attributes"] = [
            msgspec.to_builtins({"name": each.name, "type": each.type, "value": each.value})
            for each in extras.attributes
        ]
    if extras.dead_letter_source is not None:
        shown["dead_letter_source"] = shown_key(extras.dead_letter_source)
        shown["dead_letter_receives"] = extras.dead_receives
    return shown


def shown_lease(held: HeldMessage) -> dict[str, Any]:
    """A message's state, from its row in `lease` or the lack of one."""
    attempt = held.attempt
    if attempt is None:
        return {"state": "visible", "receive_count": 0}
    state = "visible" if not held.hidden else ("in flight" if attempt else "delayed")
    shown: dict[str, Any] = {
        "state": state,
        "receive_count": attempt,
        "rotation": held.rotation,
        "due": held.due,
        "first_received": held.first,
    }
    return shown | {"granted": held.granted} if attempt else shown


def shown_delivery(message: Delivery) -> dict[str, Any]:
    """A message of a receive, or of a peek: then without `handle` and `due`."""
    shown: dict[str, Any] = {
        "id": id_text(message.id),
        "sequence": message.sequence,
        "body": message.body,
        "md5": message.md5.hex(),
        "sender": message.sender,
        "priority": message.priority,
        "sent": message.sent,
        "expires": shown_instant(message.expires),
        "receive_count": message.receive_count,
        "first_received": message.first_received,
    } | shown_extras(message.extras)
    if message.handle:
        shown |= {"handle": message.handle, "due": message.due}
    return shown


def shown_sent(sent: Sent) -> dict[str, Any]:
    """The result of a send."""
    return {
        "id": id_text(sent.id),
        "sequence": sent.sequence,
        "sent": sent.sent,
        "visible": sent.visible,
        "expires": shown_instant(sent.expires),
        "duplicate": sent.duplicate,
    }


def shown_move(task: MoveInfo) -> dict[str, Any]:
    """A message move task."""
    return {
        "id": id_text(task.id),
        "source": shown_key(task.source),
        "destination": None if task.destination is None else shown_key(task.destination),
        "rate_max": task.rate_max,
        "status": task.status,
        "failure": task.failure,
        "started": task.started,
        "moved": task.moved,
        "to_move": task.to_move,
    }


def shown_topic(reader: "Reader", topic: LiveTopic, pushes: "PushRoom | None") -> dict[str, Any]:
    """A topic with all its subscriptions."""
    return {
        "account": topic.key.account,
        "region": topic.key.region,
        "name": topic.key.name,
        "incarnation": topic.incarnation,
        "created": topic.created,
        "modified": topic.modified,
        "settings": msgspec.to_builtins(topic.settings),
        "subscriptions": [
            _shown_subscription(reader, topic, each, pushes) for _, each in sorted(topic.subscriptions.items())
        ],
    }


def _shown_subscription(
    reader: "Reader", topic: LiveTopic, subscription: LiveSubscription, pushes: "PushRoom | None"
) -> dict[str, Any]:
    settings = subscription.settings
    shown: dict[str, Any] = {
        "name": subscription.name,
        "created": subscription.created,
        "modified": subscription.modified,
        "settings": msgspec.to_builtins(settings),
        "push": None,
    }
    if settings.url is not None:
        hidden = reader.queues.get(hidden_queue(topic.key, subscription.name))
        state: Mapping[str, object] = {} if pushes is None else pushes.state(settings.url)
        shown["push"] = {**state, "waiting": None if hidden is None else shown_counts(hidden.info().counts)}
    return shown
