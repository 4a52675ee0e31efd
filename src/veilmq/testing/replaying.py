"""Rebuilds the state from a history, starting at offset 0 or at a snapshot in it.

Strategy: a state has the content and names of `GET /api/v1/snapshot`. Each kind of event that changes the state has one
method, which asserts everything that the event presupposes, so that a history with a hole fails. While a snapshot is
being read, events of messages that it has not reported yet are skipped: it will report their result. A snapshot that
comes when the state is already known is compared with it.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any, Final

import msgspec

from veilmq.model.events import EventRecord, Part
from veilmq.model.instant import FOREVER
from veilmq.model.settings.queue import PRIORITY_DEFAULT, QueueSettings

_LEASE: Final = ("rotation", "due", "granted", "first_received")
_PRIVATE: Final = ("labels", "tags")
"""Settings that the history does not contain."""
_DEFAULTS: Final[dict[str, Any]] = msgspec.to_builtins(QueueSettings())


class NotReplayable(Exception):
    """The events contain neither offset 0 nor a complete snapshot."""


class State(msgspec.Struct):
    """Queues by incarnation and messages by sequence."""

    queues: dict[int, dict[str, Any]] = {}
    messages: dict[int, dict[str, Any]] = {}

    def at(self, instant: int) -> "State":
        """The state for comparison: a delay that ends by `instant` counts as over, whether or not anybody has looked.

        `expires` is computed; an instant that never comes is None, as in the snapshot. A setting that is missing
        because it is younger than the history has its default.
        """
        queues = {number: queue | {"settings": _settings(queue["settings"])} for number, queue in self.queues.items()}
        messages = {number: self._message(message, instant) for number, message in self.messages.items()}
        return State(queues, messages)

    def _message(self, message: dict[str, Any], instant: int) -> dict[str, Any]:
        shown = dict(message)
        if shown["receive_count"] == 0 and shown["state"] in {"visible", "delayed"}:
            shown["state"] = "delayed" if (shown.get("due") or 0) > instant else "visible"
        if "expires" not in shown:
            shown["expires"] = shown["sent"] + self.queues[shown["incarnation"]]["settings"]["retention_us"]
        if (shown["expires"] or FOREVER) >= FOREVER:
            shown["expires"] = None
        return {name: value for name, value in shown.items() if value is not None}


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in (_DEFAULTS | given).items() if name not in _PRIVATE}


def state_of(lines: Iterable[dict[str, Any]]) -> State:
    """The state in the lines of `GET /api/v1/snapshot`."""
    state = State()
    for line in lines:
        match line:
            case {"queue": queue}:
                state.queues[queue["incarnation"]] = queue
            case {"message": message}:
                usual = message["sent"] + state.queues[message["incarnation"]]["settings"]["retention_us"]
                own = message["expires"] != usual
                state.messages[message["sequence"]] = {k: v for k, v in message.items() if own or k != "expires"}
    return state


def replay(events: Iterable[EventRecord], state: State | None = None) -> State:
    """The state after the last of these consecutive events.

    They begin at offset 0, or contain the begin of a snapshot; events before it are skipped. With a `state`, they begin
    at its offset. Raises NotReplayable.
    """
    replaying = Replaying(state)
    for event in events:
        replaying.add(event)
    return replaying.state()


class Replaying:
    """An incremental replay."""

    def __init__(self, state: State | None = None) -> None:
        self._state = State() if state is None else deepcopy(state)
        self._following: int | None = None
        self._complete = state is not None
        self._last: int | None = None
        """While reading the snapshot that the state starts from: the last sequence that it will report."""
        self._met = 0
        """The last sequence that it has reported."""
        self._steps: dict[str, Callable[[EventRecord], None]] = {
            "queue_created": self._queue_created,
            "queue_changed": self._queue_changed,
            "queue_deleted": self._queue_deleted,
            "purged": self._purged,
            "sent": self._sent,
            "received": self._received,
            "extended": self._extended,
            "lease_resumed": self._lease_resumed,
            "released": self._visible_now,
            "undelivered": self._visible_now,
            "lease_expired": self._lease_expired,
            "expired_after_change": self._lease_expired,
            "retry_due": self._lease_expired,
            "released_for_retry": self._released_for_retry,
            "content_updated": self._content_updated,
            "deleted": self._left,
            "expired": self._left,
            "dead_lettered": self._moved,
            "moved": self._moved,
            "quarantined": self._quarantined,
            "quarantine_dropped": self._left,
            "snapshot": self._snapshot,
        }

    def add(self, event: EventRecord) -> None:
        """Apply the next event."""
        assert self._following in {None, event.offset}, f"{event.offset} follows {self._following}"
        if self._following is None and event.offset == 0:
            self._complete = True
        self._following = event.offset + 1
        begins = event.kind == "snapshot" and (event.detail or {})["part"] == Part.BEGIN
        if self._complete or begins or self._last is not None:
            step = self._steps.get(event.kind)
            if step is not None:
                step(event)

    def state(self) -> State:
        """The state so far. Raises NotReplayable."""
        if not self._complete:
            raise NotReplayable("the events hold neither offset 0 nor a complete snapshot")
        return self._state

    def _queue(self, incarnation: int | None) -> dict[str, Any] | None:
        assert incarnation is not None
        queue = self._state.queues.get(incarnation)
        assert queue is not None or not self._complete, f"queue {incarnation} is not known"
        return queue

    def _message(self, event: EventRecord) -> dict[str, Any] | None:
        """The message of the event; None if a snapshot has not reported it yet."""
        sequence = event.sequence
        assert sequence is not None
        message = self._state.messages.get(sequence)
        if message is None:
            to_come = self._last is not None and self._met < sequence <= self._last
            assert to_come, f"offset {event.offset}: {event.kind} of message {sequence}, which is not known"
            return None
        assert message["incarnation"] == event.incarnation, event
        assert message["id"] == event.message, event
        return message

    def _add(self, message: dict[str, Any]) -> None:
        sequence = message["sequence"]
        assert sequence not in self._state.messages, f"message {sequence} came twice"
        if self._complete:
            assert message["incarnation"] in self._state.queues, message
        self._state.messages[sequence] = message

    def _leave(self, incarnation: int | None, last: int = FOREVER) -> int:
        messages = self._state.messages
        gone = [number for number, one in messages.items() if one["incarnation"] == incarnation and number <= last]
        left = [messages.pop(number) for number in gone]
        return sum(message["state"] != "quarantined" for message in left)

    def _queue_created(self, event: EventRecord) -> None:
        assert event.incarnation is not None
        detail = event.detail or {}
        named = {name: detail[name] for name in ("account", "region", "name", "settings")}
        number = event.incarnation
        self._state.queues[number] = named | {"incarnation": number, "created": event.at, "modified": event.at}

    def _queue_changed(self, event: EventRecord) -> None:
        queue, detail = self._queue(event.incarnation), event.detail or {}
        change = detail.get("change")
        if change is None:
            return
        before_us = detail.get("delay_before_us")
        if queue is not None:
            before = queue["settings"]
            if before["fifo"] and "delay_us" in change:
                before_us = before["delay_us"]
            queue["settings"] = before | {name: value for name, value in change.items() if name not in _PRIVATE}
            queue["modified"] = detail.get("modified", event.at)
        if before_us is not None:
            self._retime(event, before_us, change["delay_us"])

    def _retime(self, event: EventRecord, before_us: int, after_us: int) -> None:
        """Apply a FIFO queue's new delay to its messages, except those whose delay was set otherwise."""
        for message in self._state.messages.values():
            if message["incarnation"] != event.incarnation or message["receive_count"]:
                continue
            due, delayed = message.get("due"), message["sent"] + after_us
            if message["state"] == "quarantined" or (due is not None and due != message["sent"] + before_us):
                continue
            if due is not None or (after_us > before_us and delayed > event.at):
                message |= {"rotation": message.get("rotation") or 0, "due": delayed}

    def _queue_deleted(self, event: EventRecord) -> None:
        self._queue(event.incarnation)
        self._counted(event, self._leave(event.incarnation))
        self._state.queues.pop(event.incarnation or 0, None)

    def _purged(self, event: EventRecord) -> None:
        self._queue(event.incarnation)
        self._counted(event, self._leave(event.incarnation, (event.detail or {})["watermark"]))

    def _counted(self, event: EventRecord, left: int) -> None:
        count = (event.detail or {})["count"]
        assert left == count or (left < count and not self._complete), f"{event}: {left} were there"

    def _sent(self, event: EventRecord) -> None:
        assert event.visible_since is not None
        message = _arrived(event, event.incarnation, event.sequence, event.message, event.sent)
        if event.visible_since > event.at:
            message |= {"rotation": 0, "due": event.visible_since}
        self._add(message)

    def _received(self, event: EventRecord) -> None:
        message = self._message(event)
        if message is None:
            return
        assert event.attempt == message["receive_count"] + 1, event
        assert message["state"] != "in flight", event
        assert event.lease_us is not None
        message["first_received"] = message.get("first_received") or event.at
        leased = {"receive_count": event.attempt, "rotation": event.rotation, "granted": event.at}
        message |= leased | {"state": "in flight", "due": event.at + event.lease_us}

    def _used(self, event: EventRecord) -> dict[str, Any] | None:
        message = self._message(event)
        if message is not None:
            assert event.attempt == message["receive_count"], event
            message["rotation"] = event.rotation
        return message

    def _extended(self, event: EventRecord) -> None:
        message = self._used(event)
        if message is not None:
            assert event.lease_us is not None
            message["due"] = event.at + event.lease_us
            message["state"] = "in flight" if event.attempt else "visible"

    def _lease_resumed(self, event: EventRecord) -> None:
        known = self._state.messages.get(event.sequence or 0)
        assert event.attempt, event
        assert known is None or known["state"] == "visible", event
        self._extended(event)

    def _released_for_retry(self, event: EventRecord) -> None:
        assert event.attempt, event
        if event.lease_us:
            self._extended(event)
        else:
            self._visible_now(event)

    def _visible_now(self, event: EventRecord) -> None:
        message = self._used(event)
        if message is not None:
            message |= {"state": "visible", "due": event.at}

    def _lease_expired(self, event: EventRecord) -> None:
        message = self._used(event)
        if message is not None:
            assert message["state"] == "in flight", event
            assert message["due"] == event.at, event
            message["state"] = "visible"

    def _content_updated(self, event: EventRecord) -> None:
        message = self._message(event)
        if message is not None:
            message["body_bytes"] = event.body_bytes

    def _left(self, event: EventRecord) -> None:
        if self._message(event) is not None:
            del self._state.messages[event.sequence or 0]

    def _moved(self, event: EventRecord) -> None:
        """Also for an unknown message: the event says what it is elsewhere, except in the oldest events."""
        known = self._message(event) or {}
        self._state.messages.pop(event.sequence or 0, None)
        detail = {name: known[name] for name in ("priority", "expires") if name in known} | (event.detail or {})
        anew = event.kind == "moved"
        sent = event.at if anew else self._sent_anew(event, detail)
        message = detail["target_message"] if anew else event.message
        arrived = _arrived(event, detail["target"], detail["target_sequence"], message, sent) | _own(detail)
        if event.visible_since is not None:
            arrived |= {"rotation": 0, "due": event.visible_since}
        self._add(arrived)

    def _sent_anew(self, event: EventRecord, detail: dict[str, Any]) -> int | None:
        """On a FIFO queue a dead letter's time starts again; the oldest events do not say so."""
        target = self._state.queues.get(detail["target"])
        anew = target is not None and target["settings"]["fifo"]
        return detail.get("sent", event.at if anew else event.sent)

    def _quarantined(self, event: EventRecord) -> None:
        message = self._message(event)
        if message is not None:
            message |= dict.fromkeys(_LEASE) | {"state": "quarantined", "receive_count": 0}

    def _snapshot(self, event: EventRecord) -> None:
        detail = event.detail or {}
        if self._complete:
            self._hold_against(event, detail)
            return
        match detail["part"]:
            case Part.BEGIN:
                self._state, self._last, self._met = State(), detail["last"], 0
            case Part.QUEUE:
                self._queue_created(event)
                self._state.queues[event.incarnation or 0] |= {name: detail[name] for name in ("created", "modified")}
            case Part.MESSAGES:
                for message in detail["messages"]:
                    self._add(message | {"incarnation": event.incarnation})
                    self._met = max(self._met, message["sequence"])
            case Part.END:
                self._complete, self._last = True, None
                unknown = {each["incarnation"] for each in self._state.messages.values()} - self._state.queues.keys()
                assert not unknown, f"messages of queues {unknown}, which are not known"

    def _hold_against(self, event: EventRecord, detail: dict[str, Any]) -> None:
        """Compare the known state with the snapshot."""
        if detail["part"] == Part.MESSAGES:
            for message in detail["messages"]:
                given = State(self._state.queues, {0: message | {"incarnation": event.incarnation}}).at(event.at)
                known = State(self._state.queues, {0: self._state.messages[message["sequence"]]}).at(event.at)
                assert given.messages == known.messages, event.offset
        elif detail["part"] == Part.QUEUE:
            queue = self._queue(event.incarnation)
            assert queue is not None
            shown = {name: value for name, value in detail.items() if name != "part"}
            given, known = (
                State({0: each}).at(event.at) for each in (shown | {"incarnation": event.incarnation}, queue)
            )
            assert given == known, event.offset


def _arrived(
    event: EventRecord, incarnation: int | None, sequence: int | None, message: str | None, sent: int | None
) -> dict[str, Any]:
    """A message that this event put into a queue, visible."""
    return {
        "incarnation": incarnation,
        "sequence": sequence,
        "id": message,
        "sent": sent,
        "group": event.group,
        "type": event.type,
        "body_bytes": event.body_bytes,
        "state": "visible",
        "receive_count": 0,
    } | _own(event.detail or {})


def _own(detail: dict[str, Any]) -> dict[str, Any]:
    """The fields that a plain message does not have."""
    return {"priority": PRIORITY_DEFAULT} | {name: detail[name] for name in ("priority", "expires") if name in detail}
