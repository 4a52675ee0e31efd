"""Declared queues: a file of queues that exist when the server has started.

    [[queue]]
    name = "orders"                    # dead_letter, tags and the rest may be left out
    account = "111111111111"           # default: the file's only account; in development mode 000000000000
    region = "us-east-1"               # default: the account's home region
    visibility_timeout = "30s"         # ms, s, m, h, d, or a number of seconds; so are delay, retention, wait
    message_bytes_max = 262144
    dead_letter = { queue = "orders-dead", receive_count_max = 3 }
    tags = { team = "shop" }

Strategy: a file becomes a list of `Declaration`s, dead-letter queues before the queues that name them. Each is a
create, which writes nothing if the queue has the same settings, and a change for when they differ. Settings that the
file does not name stay, and no queue is ever deleted. ElasticMQ's `queues {}` (elasticmq_file.py) becomes the same
list.
"""

import logging
import re
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from veilmq.model.commands import SERVER, AnyCommand, ChangeQueue, CreateQueue
from veilmq.model.errors import NAME_TAKEN, QueueExists, QueueMissing, VeilError
from veilmq.model.instant import DAY_US, HOUR_US, MILLISECOND_US, MINUTE_US, SECOND_US
from veilmq.model.messages import first_forbidden_character
from veilmq.model.outcomes import Outcome
from veilmq.model.settings.access import HOME_REGION_DEFAULT
from veilmq.model.settings.queue import QueueKey, RedrivePolicy, SettingsChange, XmlBody, is_alias
from veilmq.server.auth import ACCOUNT_ID, Account
from veilmq.server.config import FileInvalid, LineNumbers, elasticmq_file, read_text, read_toml

RECEIVES_MAX: Final = 1_000
TAGS_MAX: Final = 50
FIFO_SUFFIX: Final = ".fifo"
ELASTICMQ_SUFFIXES: Final = (".conf", ".hocon")

log = logging.getLogger("veilmq.queues")

_NAME: Final = re.compile(r"(?=.{1,256}\Z)[A-Za-z0-9_-]+(?:\.fifo)?")
_REGION: Final = re.compile(r"[a-z0-9-]{1,64}")
_DURATION: Final = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*(ms|s|m|h|d)")
_UNITS_US: Final = {"ms": MILLISECOND_US, "s": SECOND_US, "m": MINUTE_US, "h": HOUR_US, "d": DAY_US}

# The widest of the three clouds.
_DURATIONS: Final = {
    "visibility_timeout": ("visibility_timeout_us", 0, 12 * HOUR_US),
    "delay": ("delay_us", 0, 7 * DAY_US),
    "retention": ("retention_us", MINUTE_US, 15 * DAY_US),
    "wait": ("wait_us", 0, 30 * SECOND_US),
}


class Declaration(NamedTuple):
    """One declared queue: create it, and if it exists with other settings, change it."""

    create: CreateQueue
    change: ChangeQueue
    line: int | None


class Declared(NamedTuple):
    """What a file declares, in the order of application, and what is skipped."""

    path: Path
    queues: list[Declaration]
    warnings: list[str]
    account_alias: str | None
    """What a queue URL may contain instead of the caller's account (an ElasticMQ file's account id)."""
    account: str | None
    """The account of all queues of an ElasticMQ file that names one."""
    region: str | None
    """The region of all queues of an ElasticMQ file."""
    names_region: bool
    """False if the region is the default of such files."""

    def shown(self) -> str:
        """The number of queues per region."""
        counts = Counter(declaration.create.queue.region for declaration in self.queues)
        shown = ", ".join(f"{count} in region {region}" for region, count in sorted(counts.items())) or "none"
        return shown if self.names_region else f"{shown} (the file names no aws.region)"


DECLARED_TOGETHER: Final = 250


class Call(Protocol):
    """Runs commands as one batch and returns their durable outcomes (Shell.call)."""

    def __call__(self, *commands: AnyCommand) -> Awaitable[Sequence[Outcome]]:
        """One outcome a command."""


async def declare(declared: Declared, call: Call) -> None:
    """Create or change the queues, many in one commit. Raises FileInvalid if the store refuses one."""
    for warning in declared.warnings:
        log.warning("%s", warning)
    for start in range(0, len(declared.queues), DECLARED_TOGETHER):
        group = declared.queues[start : start + DECLARED_TOGETHER]
        created = await call(*[declaration.create for declaration in group])
        for declaration, outcome in zip(group, created, strict=True):
            reason = await _refused(declaration, outcome, call)
            if reason is not None:
                who = f"queue {declaration.create.queue.name}"
                raise FileInvalid(declared.path, f"{who}: {reason}", declaration.line)
    log.info("queues that %s declares: %s", declared.path, declared.shown())


async def _refused(declaration: Declaration, found: Outcome, call: Call) -> str | None:
    """Why the queue cannot be made as declared, or None. found: the outcome of its creation."""
    if isinstance(found, VeilError):
        (found,) = await call(declaration.create)  # the obstacle may just have been changed
    in_the_way, name = found, str(declaration.create.queue)
    if isinstance(found, QueueExists):
        (found,) = await call(declaration.change)
    if not isinstance(found, VeilError):
        return None
    if isinstance(found, QueueMissing) and found.queue == name:  # so it is not there by that name
        found = in_the_way
    if isinstance(found, QueueExists) and found.setting == NAME_TAKEN:
        if found.queue == name:
            return "another queue has this name as its alias"
        return f"alias: {declaration.create.change.get('alias')} is another queue's name or alias"
    return str(found)


class _Entry(NamedTuple):
    key: QueueKey
    change: SettingsChange
    line: int | None


def read(path: Path, accounts: Sequence[Account], *, checks: bool = False) -> Declared:
    """The queues of the file. Raises FileInvalid, naming line, queue and key.

    accounts: if there is only one, it owns the queues that name none. checks: no other account has keys.
    """
    if path.suffix in ELASTICMQ_SUFFIXES:
        found = elasticmq_file.read(path, read_text(path))
        tables, warnings, account_alias = found.tables, found.warnings, found.account_alias
        lines: LineNumbers | Sequence[int] = found.lines
        account, region, names_region = found.account, found.region, found.names_region
    else:
        whole, lines = read_toml(path)
        tables, warnings, account_alias = _tables(path, whole, lines), [], None
        account, region, names_region = None, None, True
    reader = _Reader(path, lines, accounts)
    entries = [reader.entry(*each) for each in enumerate(tables)]
    if checks:
        known = {account.id for account in accounts}
        warnings += [
            f"{path}: queue {key.name}: account {key.account} is not in the credentials file: nobody reaches it"
            for key, _, _ in entries
            if key.account not in known
        ]
    return Declared(path, _in_order(path, entries), warnings, account_alias, account, region, names_region)


def _tables(path: Path, whole: Mapping[str, Any], lines: LineNumbers) -> list[Any]:
    for name in whole:
        if name != "queue":
            raise FileInvalid(path, f"unknown table {name}: a queues file holds [[queue]] tables", lines.of(name))
    tables = whole.get("queue", [])
    if not isinstance(tables, list):
        raise FileInvalid(path, "write each queue as [[queue]], with two brackets", lines.of("queue"))
    return tables


class _DeadLetter(msgspec.Struct, forbid_unknown_fields=True):
    queue: str
    receive_count_max: int


class _Queue(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    account: str | None = None
    region: str | None = None
    visibility_timeout: str | int | float | None = None
    delay: str | int | float | None = None
    retention: str | int | float | None = None
    wait: str | int | float | None = None
    message_bytes_max: int | None = None
    dead_letter: _DeadLetter | None = None
    fifo: bool | None = None
    content_deduplication: bool | None = None
    xml_body: XmlBody | None = None
    alias: str | None = None
    tags: dict[str, str] | None = None


class _Reader:
    def __init__(self, path: Path, lines: LineNumbers | Sequence[int], accounts: Sequence[Account]) -> None:
        self._path = path
        self._lines = lines
        self._sole = accounts[0].id if len(accounts) == 1 else None
        self._regions = {account.id: account.home_region for account in accounts}
        self._seen: dict[QueueKey, int | None] = {}
        self._aliases: dict[QueueKey, tuple[str, int | None]] = {}
        """The queue that declares each alias, and its line."""

    def entry(self, place: int, table: object) -> _Entry:
        try:
            read = msgspec.convert(table, _Queue)
        except msgspec.ValidationError as error:
            raise self._error(place, self._who(place, table), *_explained(error)) from None
        who = f"queue {read.name}"
        if not _NAME.fullmatch(read.name):
            raise self._error(
                place, who, "name: expected letters, digits, _ and -, with .fifo at the end of a FIFO queue's"
            )
        key = self._key(place, who, read)
        if key in self._seen:
            raise self._error(place, who, "declared twice")
        line = self._seen[key] = self._line(place)
        return _Entry(key, self._change(place, who, key, read), line)

    def _key(self, place: int, who: str, read: _Queue) -> QueueKey:
        account = read.account or self._sole
        if account is None:
            raise self._error(place, who, "account: name one, there are several in the credentials file", "account")
        if not ACCOUNT_ID.fullmatch(account):
            raise self._error(place, who, "account: expected 12 digits", "account")
        region = read.region or self._regions.get(account, HOME_REGION_DEFAULT)
        if not _REGION.fullmatch(region):
            raise self._error(place, who, "region: expected a region such as us-east-1", "region")
        return QueueKey(account, region, read.name)

    def _change(self, place: int, who: str, key: QueueKey, read: _Queue) -> SettingsChange:
        change: SettingsChange = {}
        for name, (field, least_us, most_us) in _DURATIONS.items():
            given = getattr(read, name)
            if given is None:
                continue
            value = duration_us(given)
            if value is None or not least_us <= value <= most_us:
                allowed = f'expected {_shown(least_us)} to {_shown(most_us)}, as 30, "30s", "5m", "12h" or "4d"'
                raise self._error(place, who, f"{name}: {allowed}", name)
            change[field] = value
        if read.message_bytes_max is not None:
            if not 1_024 <= read.message_bytes_max <= 1_048_576:
                raise self._error(place, who, "message_bytes_max: expected 1024 to 1048576", "message_bytes_max")
            change["message_bytes_max"] = read.message_bytes_max
        is_fifo = key.name.endswith(FIFO_SUFFIX)
        if read.fifo is not None and read.fifo != is_fifo:
            raise self._error(
                place, who, f"fifo: a queue is FIFO if its name ends in {FIFO_SUFFIX}, and only then", "fifo"
            )
        if is_fifo:
            change["fifo"] = True
        if read.content_deduplication and not is_fifo:
            raise self._error(place, who, "content_deduplication: only a FIFO queue has it", "content_deduplication")
        if read.content_deduplication is not None and is_fifo:
            change["content_deduplication"] = read.content_deduplication
        if read.dead_letter is not None:
            change["redrive"] = self._redrive(place, who, key, read.dead_letter)
        if read.xml_body is not None:
            change["xml_body"] = read.xml_body
        if read.alias is not None:
            change["alias"] = self._alias(place, who, key, read.alias)
        if read.tags is not None:
            change["tags"] = self._tags(place, who, read.tags)
        return change

    def _tags(self, place: int, who: str, tags: dict[str, str]) -> dict[str, str]:
        if len(tags) > TAGS_MAX:
            raise self._error(place, who, f"tags: expected at most {TAGS_MAX}", "tags")
        for text in (text for tag in tags.items() for text in tag):
            if first_forbidden_character(text) is not None:
                raise self._error(place, who, f"tags: a character of {text!a} is not allowed", "tags")
        return tags

    def _alias(self, place: int, who: str, key: QueueKey, alias: str) -> str:
        if not is_alias(alias) or is_alias(key.name):
            allowed = "3 to 63 of a-z, 0-9 and single -, for a queue whose own name is not of these alone"
            raise self._error(place, who, f"alias: expected {allowed}", "alias")
        wanted = QueueKey(key.account, key.region, alias)
        if wanted in self._aliases:
            other, line = self._aliases[wanted]
            where = "" if line is None else f" (line {line})"
            raise self._error(place, who, f"alias: {alias} is the alias of queue {other}{where} already", "alias")
        self._aliases[wanted] = (key.name, self._line(place, "alias"))
        return alias

    def _redrive(self, place: int, who: str, key: QueueKey, read: _DeadLetter) -> RedrivePolicy:
        if not 1 <= read.receive_count_max <= RECEIVES_MAX:
            raise self._error(
                place, who, f"dead_letter: receive_count_max: expected 1 to {RECEIVES_MAX}", "dead_letter"
            )
        if read.queue == key.name or not _NAME.fullmatch(read.queue):
            raise self._error(place, who, "dead_letter: queue: expected the name of another queue", "dead_letter")
        return RedrivePolicy(QueueKey(key.account, key.region, read.queue), read.receive_count_max)

    def _who(self, place: int, table: object) -> str:
        name = table.get("name") if isinstance(table, dict) else None
        return f"queue {name}" if isinstance(name, str) else f"queue {place + 1}"

    def _line(self, place: int, *field: str) -> int | None:
        return self._lines.of("queue", place, *field) if isinstance(self._lines, LineNumbers) else self._lines[place]

    def _error(self, place: int, who: str, reason: str, *field: str) -> FileInvalid:
        return FileInvalid(self._path, f"{who}: {reason}", self._line(place, *field))


def _explained(error: msgspec.ValidationError) -> tuple[str, ...]:
    """msgspec's message in our words, and its key."""
    text = str(error)
    unknown = re.search("unknown field `([^`]*)`", text)
    if unknown is not None:
        known = ", ".join(_Queue.__struct_fields__)
        return f"unknown key {unknown[1]}: the keys are {known}", unknown[1]
    reason, _, at = text.replace("`", "").partition(" - at $.")
    reason = reason[0].lower() + reason[1:]
    return (f"{at}: {reason}", at.partition(".")[0]) if at else (reason,)


def duration_us(given: str | float) -> int | None:
    """Microseconds of `30s`, `1.5h`, or of a number of seconds; None for anything else."""
    if isinstance(given, str):
        found = _DURATION.fullmatch(given.strip())
        return None if found is None else round(float(found[1]) * _UNITS_US[found[2]])
    return round(given * SECOND_US) if abs(given) < 10**9 else None


def _shown(duration: int) -> str:
    unit = next(unit for unit in ("d", "h", "m", "s") if duration % _UNITS_US[unit] == 0)
    return f"{duration // _UNITS_US[unit]}{unit}" if duration else "0"


def _in_order(path: Path, entries: list[_Entry]) -> list[Declaration]:
    """Dead-letter queues before the queues that name them; otherwise in the file's order."""
    by_key = {entry.key: entry for entry in entries}
    ordered: dict[QueueKey, _Entry] = {}
    for entry in entries:
        chain = [entry]
        while (target := _target(chain[-1], by_key)) is not None and target.key not in ordered:
            if target in chain:
                raise FileInvalid(path, f"queue {entry.key.name}: its dead letters go round in a circle", entry.line)
            chain.append(target)
        ordered |= {each.key: each for each in reversed(chain) if each.key not in ordered}
    return [
        Declaration(
            CreateQueue(queue=entry.key, origin=SERVER, change=entry.change),
            ChangeQueue(queue=entry.key, origin=SERVER, change=entry.change),
            entry.line,
        )
        for entry in ordered.values()
    ]


def _target(entry: _Entry, by_key: Mapping[QueueKey, _Entry]) -> _Entry | None:
    redrive = entry.change.get("redrive")
    return by_key.get(redrive.target) if redrive is not None else None
