"""What `veilmq import` does: reads queues that another service has, and prints them as a queues file or creates them.

Strategy: each kind of source becomes a list of `Found`: a name, a `Template`, and what of its settings nothing here
has. The kind of a path or URL is known by its form. Without --to nothing is changed: the file that is printed is what
`veilmq serve --queues` takes. Sources: ElasticMQ's configuration; Azurite's `__azurite_db_queue__.json` (LokiJS) with
its extents; GetQueueAttributes in the SQS API Reference, as `aws` prints it.
"""

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any, Final, NamedTuple

import msgspec

from veilmq.cli.failures import Exit, Failure, closed_to_user
from veilmq.cli.migrate.bridge import failing
from veilmq.cli.output import printable, write_new
from veilmq.client.adapters.connect import SCHEMES, connect_account, parse_url
from veilmq.client.bridge.carrying import time_to_live
from veilmq.client.clock import SYSTEM
from veilmq.client.errors import TransportError
from veilmq.client.messages import Message, Template
from veilmq.client.queue import Account as Queues
from veilmq.client.queue import Queue
from veilmq.client.shared import split
from veilmq.model.errors import NAME_TAKEN, QueueExists, VeilError
from veilmq.model.instant import SECOND_US
from veilmq.model.settings.access import DEVELOPMENT_ACCOUNT, HOME_REGION_DEFAULT
from veilmq.model.settings.queue import QueueKey
from veilmq.model.wording import counted
from veilmq.server.auth import Account
from veilmq.server.config import FileInvalid, queues_file

DATABASE: Final = "__azurite_db_queue__.json"
_EXTENTS: Final = "__azurite_db_queue_extent__.json"
_EXTENT_DIRECTORY: Final = "__queuestorage__"
_QUEUES: Final = "$QUEUES_COLLECTION$"
_MESSAGES: Final = "$MESSAGES_COLLECTION$"
_EXTENT_ROWS: Final = "$EXTENTS_COLLECTION$"
_MEMBERS: Final = {
    _QUEUES: ("accountName", "name"),
    _MESSAGES: ("accountName", "queueName"),
    _EXTENT_ROWS: ("id", "path"),
}
"""Texts that each row of a collection has."""
_DEVELOPMENT: Final = "devstoreaccount1"
_SENT_TOGETHER: Final = 100
_BYTES_MAX: Final = {"azure": 65_536, "mns": 65_536}
"""Bytes of a message, of the protocols that have less than SQS."""
_REASONS_MAX: Final = 10
"""Different reasons why a queue refused messages, that are printed."""
_SECONDS: Final = {
    "VisibilityTimeout": "visibility_timeout",
    "DelaySeconds": "delay",
    "MessageRetentionPeriod": "retention",
    "ReceiveMessageWaitTimeSeconds": "wait",
}
_NOT_BROUGHT: Final = {
    "Policy": "its access policy: set it again over SQS",
    "KmsMasterKeyId": "its encryption key",
    "RedriveAllowPolicy": "which queues may name it as dead-letter queue",
}
_OFF: Final = {"DeduplicationScope": "queue", "FifoThroughputLimit": "perQueue"}
"""Attributes of FIFO queues, and the value that is ours, too."""


_Key = tuple[str, str]


class Found(NamedTuple):
    """A queue of another service."""

    name: str
    template: Template
    region: str | None = None
    lost: tuple[str, ...] = ()
    """Settings that VeilMQ does not have, or not for all protocols."""
    messages: tuple[Message, ...] = ()

    @property
    def key(self) -> _Key:
        """Region and name. None named is the one that a queues file means without."""
        return self.region or HOME_REGION_DEFAULT, self.name

    @property
    def dead_letter_key(self) -> _Key:
        """Of its dead-letter queue, in the same region; of no queue if it has none."""
        return self.key[0], self.template.dead_letter_queue or ""


def bring(given: Mapping[str, Any]) -> Exit:
    """Print the queues of the sources, or create them. Raises Failure."""
    if given["messages"] and given["to"] is None:
        raise Failure(Exit.USAGE, "--messages: where to? Say --to URL")
    if given["into"] is not None and given["to"] is not None:
        raise Failure(Exit.USAGE, "--into writes a file, and --to creates the queues: say one of them")
    found = [each for source in given["sources"] for each in _read(source, given["account"])]
    found = [each for each in found if each.name.startswith(given["prefix"])]
    if not found:
        such = f" whose name begins with {printable(given['prefix'])}" if given["prefix"] else ""
        print(f"nothing to bring: no queue{such} was found", file=sys.stderr)
    if given["to"] is None:
        found = _closed(_in_order(found))
    else:
        with failing("--to"):
            there = parse_url(given["to"])
        found = _of_one_region(found, there.region or HOME_REGION_DEFAULT)
        found = _in_order([_of_size(each._replace(region=None), _BYTES_MAX.get(there.kind)) for each in found])
    for each in found:
        for text in each.lost:
            _report_lost(each.name, text)
    if given["to"] is None:
        _print(found, given["into"])
        return Exit.DONE
    with failing("--to"):
        account = connect_account(given["to"])
    with closing(account):
        return _create(account, found, with_messages=given["messages"])


def _report_lost(name: str, lost: str) -> None:
    print(f"not brought: queue {printable(name)}: {printable(lost)}", file=sys.stderr)


def _read(source: str, account: str | None) -> list[Found]:
    if any(source.startswith(f"{scheme}://") for scheme in SCHEMES):
        return list(_of_endpoint(source))
    path = Path(source)
    try:
        if path.is_dir() or path.name == DATABASE:
            return _of_azurite(path if path.is_dir() else path.parent, account)
        if path.suffix in (".json", ".jsonl"):
            return [_of_attributes(each, path) for each in _documents(path)]
        return _of_file(path)
    except OSError as error:
        named = error.filename or source
        raise Failure(Exit.USAGE, f"{named}: {error.strerror}", closed_to_user(Path(named))) from None
    except FileInvalid as error:
        raise Failure(Exit.USAGE, str(error)) from None


def _of_file(path: Path) -> list[Found]:
    """ElasticMQ's configuration; also our own queues file. Raises FileInvalid."""
    declared = queues_file.read(path, [Account(DEVELOPMENT_ACCOUNT)])
    for warning in declared.warnings:
        print(f"not brought: {warning}", file=sys.stderr)
    names = declared.names_region
    return [_of_change(each.create.queue, each.create.change, names_region=names) for each in declared.queues]


def _of_change(queue: QueueKey, change: Mapping[str, Any], *, names_region: bool) -> Found:
    times = {
        field: change[f"{field}_us"] / SECOND_US
        for field in ("visibility_timeout", "delay", "retention", "wait")
        if f"{field}_us" in change
    }
    redrive = change.get("redrive")
    template = Template(
        **times,
        message_bytes_max=change.get("message_bytes_max"),
        dead_letter_queue=None if redrive is None else redrive.target.name,
        receive_count_max=None if redrive is None else redrive.receive_count_max,
        fifo=change.get("fifo", False),
        content_deduplication=change.get("content_deduplication", False),
        tags=change.get("tags", {}),
    )
    lost = [f"its {name} (--to creates no such setting)" for name in ("alias", "xml_body") if name in change]
    if queue.account != DEVELOPMENT_ACCOUNT:
        lost.append(f"its account {queue.account}")
    return Found(queue.name, template, queue.region if names_region else None, tuple(lost))


def _documents(path: Path) -> Iterator[Any]:
    """JSON values one behind the other, as several calls of `aws` print them. Raises Failure, OSError."""
    text, at = path.read_text(encoding="utf-8", errors="replace").strip(), 0
    while at < len(text):
        try:
            value, at = json.JSONDecoder().raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError):
            raise Failure(Exit.USAGE, f"{path}: is not the JSON that `aws sqs` prints") from None
        yield from value if isinstance(value, list) else [value]
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1


def _of_attributes(document: Any, path: Path | None, tags: Mapping[str, str] | None = None) -> Found:
    """A queue by its attributes (GetQueueAttributes, All). Raises Failure."""
    try:
        given = msgspec.convert(document["Attributes"], dict[str, str])
        *_, region, account, name = given["QueueArn"].split(":")
        numbers = {field: _finite(given[known]) for known, field in _SECONDS.items() if known in given}
        size = given.get("MaximumMessageSize")
        redrive = json.loads(given.get("RedrivePolicy") or "{}")
        target = redrive.get("deadLetterTargetArn", "").split(":")
        template = Template(
            **numbers,
            message_bytes_max=None if size is None else int(size),
            dead_letter_queue=target[-1] or None,
            receive_count_max=int(redrive["maxReceiveCount"]) if redrive else None,
            fifo=given.get("FifoQueue") == "true",
            content_deduplication=given.get("ContentBasedDeduplication") == "true",
            tags=dict(tags or {}),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, msgspec.ValidationError):
        where = "" if path is None else f"{path}: "
        advice = "aws sqs get-queue-attributes --queue-url URL --attribute-names All"
        raise Failure(Exit.USAGE, f"{where}expected the Attributes of a queue, with its QueueArn", advice) from None
    lost = [text for attribute, text in _NOT_BROUGHT.items() if given.get(attribute)]
    lost += [f"{name} {given[name]}" for name, ours in _OFF.items() if given.get(name, ours) != ours]
    if redrive and target[-3:-1] != [region, account]:
        template = _without_dead_letters(template)
        lost.append(f"its dead-letter queue, of another account or region: {redrive['deadLetterTargetArn']}")
    return Found(name, template, region, tuple(lost))


def _finite(text: str) -> float:
    """Raises ValueError."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _of_endpoint(url: str) -> Iterator[Found]:
    """All queues of an account that speaks SQS, with their tags. Raises Failure."""
    if not url.startswith("sqs://"):
        raise Failure(Exit.USAGE, "SOURCE: settings are read over sqs://HOST:PORT/ alone")
    with failing("SOURCE"), connect_account(url) as account:
        from veilmq.client.adapters.sqs import SqsAccount  # needs boto3

        assert isinstance(account, SqsAccount)
        for name in account.names():
            attributes, tags = account.described(name)
            yield _of_attributes(attributes, None, tags)


def _of_azurite(directory: Path, account: str | None) -> list[Found]:
    """Queues, metadata and messages of Azurite's database. Raises Failure, OSError."""
    database = _collections(directory / DATABASE)
    queues = database.get(_QUEUES, [])
    accounts = sorted({each["accountName"] for each in queues})
    wanted = account or (accounts[0] if len(accounts) == 1 else _DEVELOPMENT)
    if accounts and wanted not in accounts:
        advice = f"Say --account NAME, of {', '.join(map(printable, accounts))}."
        raise Failure(Exit.USAGE, f"{directory}: no queues of account {wanted}", advice)
    bodies = _Extents(directory)
    messages: dict[str, list[Message]] = {}
    now = SYSTEM.wall()
    for row in database.get(_MESSAGES, []):
        message = _message(row, bodies, now)
        if row["accountName"] == wanted and message is not None:
            messages.setdefault(row["queueName"], []).append(message)
    return [
        Found(each["name"], Template(tags=each.get("metadata") or {}), None, (), tuple(messages.get(each["name"], ())))
        for each in queues
        if each["accountName"] == wanted
    ]


def _collections(path: Path) -> dict[str, list[Any]]:
    """The rows of LokiJS's collections. Raises Failure, OSError."""
    try:
        whole = json.loads(path.read_bytes())
        found = {each["name"]: each["data"] for each in whole["collections"]}
        for name, members in _MEMBERS.items():
            msgspec.convert([[row[member] for member in members] for row in found.get(name, [])], list[list[str]])
        return found
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Failure(Exit.USAGE, f"{path}: is not a database of Azurite", "Is Azurite still writing it?") from None


class _Extents:
    """The files that hold the bodies, a piece each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / _EXTENT_DIRECTORY
        rows = _collections(directory / _EXTENTS).get(_EXTENT_ROWS, [])
        self._paths = {each["id"]: each["path"] for each in rows}

    def piece(self, extent: str, offset: int, count: int) -> str:
        """Raises OSError, ValueError."""
        name = Path(self._paths.get(extent, extent)).name  # only files of this directory are read
        with (self._directory / name).open("rb") as file:
            file.seek(offset)
            raw = file.read(count)
        if len(raw) != count:
            raise ValueError
        return raw.decode()


def _message(row: Mapping[str, Any], bodies: _Extents, now: float) -> Message | None:
    """None for one that has expired. Raises Failure."""
    try:
        left = datetime.fromisoformat(row["expirationTime"]).timestamp() - now
        if left <= 0:
            return None
        piece = row["persistency"]
        body = bodies.piece(piece["id"], piece["offset"], piece["count"]) if piece["count"] else ""
        # One that was received is in flight, and its lease is void now; one that was not is delayed.
        delay = 0.0 if row["dequeueCount"] else max(0.0, row["timeNextVisible"] / 1_000 - now)
    except (KeyError, TypeError, ValueError, OSError):
        named = printable(str(row.get("messageId")))
        raise Failure(
            Exit.USAGE, f"message {named}: its body or its times cannot be read", "Stop Azurite first."
        ) from None
    return Message(body, delay=delay or None, ttl=left)


def _in_order(found: Sequence[Found]) -> list[Found]:
    """Dead-letter queues before those that name them, which are of the same region. Of those that share name and region
    the first counts: a source may have several accounts."""
    ordered: dict[_Key, Found] = {}
    known: dict[_Key, Found] = {}
    for each in found:
        first = known.setdefault(each.key, each)
        if first != each:
            _report_lost(
                each.name, f"another one of this name{'' if each.region is None else f' in {each.region}'} is brought"
            )

    def add(each: Found, above: tuple[_Key, ...]) -> None:
        target = each.dead_letter_key
        if target in known and target not in above and target not in ordered:
            add(known[target], (*above, each.key))
        ordered[each.key] = each

    for each in known.values():
        add(each, (each.key,))
    return list(ordered.values())


def _of_one_region(found: Sequence[Found], region: str) -> list[Found]:
    """All go into one region: of those that share a name that of this region, or else the first."""
    chosen: dict[str, Found] = {}
    for each in found:
        first = chosen.setdefault(each.name, each)
        if first.key[0] != region == each.key[0]:
            chosen[each.name] = each
    for each in found:
        if (taken := chosen[each.name].key) != each.key:
            _report_lost(each.name, f"it is in {each.key[0]}, and the one in {taken[0]} is brought")
    brought = [each for each in found if chosen[each.name].key == each.key]
    if elsewhere := sorted({each.region for each in brought if each.region} - {region}):
        named = ", ".join(map(printable, elsewhere))
        print(f"queues of {named} go to {region}: ?region= in --to names another region", file=sys.stderr)
    return brought


def _of_size(found: Found, bytes_max: int | None) -> Found:
    """With the target's own limit, if it has no messages as large as the queue has."""
    wanted = found.template.message_bytes_max
    if bytes_max is None or wanted is None or wanted <= bytes_max:
        return found
    lost = f"its limit of {wanted} bytes: a message has at most {bytes_max} there"
    template = msgspec.structs.replace(found.template, message_bytes_max=None)
    return found._replace(template=template, lost=(*found.lost, lost))


def _closed(found: Sequence[Found]) -> list[Found]:
    """Without the policies whose dead-letter queues are not among these: `veilmq serve` refuses a file with them."""
    known, closed = {each.key for each in found}, []
    for each in found:
        target = each.template.dead_letter_queue
        if target is not None and each.dead_letter_key not in known:
            lost = f"its dead-letter queue {target}, which is not among those that are brought"
            each = each._replace(template=_without_dead_letters(each.template), lost=(*each.lost, lost))
        closed.append(each)
    return closed


def _without_dead_letters(template: Template) -> Template:
    return msgspec.structs.replace(template, dead_letter_queue=None, receive_count_max=None)


def _print(found: Sequence[Found], into: Path | None) -> None:
    lines = [line for each in found for line in _toml(each)]
    if into is None:
        if lines:
            print("\n".join(lines))
        return
    try:
        write_new(into, lines)
    except OSError as error:
        raise Failure(Exit.USAGE, f"--into: {into}: {error.strerror}") from None
    print(f"wrote {counted(len(found), 'queue')} to {into}: veilmq serve --queues {quote(str(into))}")


def _toml(found: Found) -> Iterator[str]:
    made = found.template
    yield "[[queue]]"
    yield f"name = {_text(found.name)}"
    if found.region is not None:
        yield f"region = {_text(found.region)}"
    for field in ("visibility_timeout", "delay", "retention", "wait", "message_bytes_max"):
        value = getattr(made, field)
        if value is not None:
            yield f"{field} = {value if value != int(value) else int(value)}"
    if made.dead_letter_queue is not None:
        target = f"queue = {_text(made.dead_letter_queue)}, receive_count_max = {made.receive_count_max}"
        yield f"dead_letter = {{ {target} }}"
    if made.content_deduplication:
        yield "content_deduplication = true"
    if made.tags:
        pairs = ", ".join(f"{_text(name)} = {_text(value)}" for name, value in made.tags.items())
        yield f"tags = {{ {pairs} }}"
    yield ""


def _text(value: str) -> str:
    """A basic string of TOML, whose escapes are those of JSON but for surrogate pairs."""
    return re.sub(r"\x7f", r"\\u007f", json.dumps(value, ensure_ascii=False))


class _Done:
    """What --to did so far."""

    def __init__(self) -> None:
        self.created = self.sent = self.refused = self.wrong = 0

    def text(self, queues: int, *, with_messages: bool) -> str:
        """For people."""
        refused = f", refused {self.refused}" if self.refused else ""
        sent = f", sent {counted(self.sent, 'message')}{refused}" if with_messages else ""
        return f"created {self.created} of {queues} queues{sent}"


def _create(account: Queues, found: Sequence[Found], *, with_messages: bool) -> Exit:
    done, failure = _Done(), None
    for each in found:
        try:
            done.created += account.create(each.name, each.template)
            if with_messages and each.messages:
                with account.queue(each.name) as queue:
                    _send(queue, each, done)
        except QueueExists as error:
            done.wrong += 1
            is_tag = error.setting in each.template.tags and not hasattr(each.template, error.setting)
            differs = f"value of the tag {error.setting}" if is_tag else error.setting
            why = "is another queue's alias" if error.setting == NAME_TAKEN else f"exists with another {differs}"
            print(f"left alone: queue {printable(each.name)} {why}", file=sys.stderr)
        except TransportError as error:
            advice = "A second run with --messages sends again what was sent." if done.sent else ""
            failure = Failure(Exit.ADDRESS, f"queue {each.name}: {error}", advice)
            break
        except VeilError as error:
            done.wrong += 1
            print(f"refused: queue {printable(each.name)}: {printable(str(error))}", file=sys.stderr)
    print(done.text(len(found), with_messages=with_messages))
    if failure is not None:
        raise failure
    return Exit.WRONG if done.wrong or done.refused else Exit.DONE


def _send(queue: Queue, found: Found, done: _Done) -> None:
    """Send them all but those that the queue refuses; these are counted and their reasons printed. Raises
    TransportError, when the others of its batch are counted."""
    can = queue.capabilities
    reasons: Counter[str] = Counter()
    fitting = [
        msgspec.structs.replace(
            each,
            delay=None if each.delay is None else min(each.delay, can.delay_max) or None,
            ttl=None if each.ttl is None else time_to_live(each.ttl, can),
        )
        for each in found.messages
    ]
    lost: TransportError | None = None
    for batch in split(fitting, _SENT_TOGETHER, 0, lambda message: 0):
        for outcome in queue.send_batch(batch):
            if isinstance(outcome, TransportError):
                lost = outcome
            elif isinstance(outcome, VeilError):
                reasons[f"{type(outcome).__name__}: {outcome}"] += 1
            else:
                done.sent += 1
        if lost is not None:
            break
    done.refused += reasons.total()
    for reason, count in reasons.most_common(_REASONS_MAX):
        print(
            f"refused: queue {printable(found.name)}: {counted(count, 'message')}: {printable(reason)}", file=sys.stderr
        )
    if lost is not None:
        raise lost
