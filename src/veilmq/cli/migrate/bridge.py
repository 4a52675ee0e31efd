"""What `veilmq bridge` does: shows what is lost, asks, runs the bridge with a bar, and prints what was done.

Strategy: everything that is shown before the first receive comes from the queues' capabilities and statistics, so a dry
run is the same code without the run. URLs may hold secrets, and are shown nowhere.

`Once` is a queue of our server that takes each message once, through the server's admin port: a message is one command
with an `Idempotency-Key`, so it is sent once however often the bridge repeats it, also after a kill. The server
remembers the last 10,000 commands of a day, whatever their queue. So the key is a digest of the source, its message's
id and body, and the target as it was when the bridge began: its name, its incarnation and its last purge, because what
was sent before either of these is not there any more. A command that was kept under the same key with other members is
the same message with less time to live: it is there. What says nothing about the message (no answer, a full disk, a
take-over, a token that was changed) is a TransportError, which a bridge tries again. Each thread has a connection of
its own.
"""

import base64
import hashlib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from veilmq.cli.access import Target, http_access
from veilmq.cli.access.http import HttpAccess
from veilmq.cli.failures import Exit, Failure, Missing, check_directory
from veilmq.cli.options import confirm, seconds
from veilmq.cli.output import bar, print_json, printable
from veilmq.client.adapters.cloud import is_here
from veilmq.client.adapters.connect import Address, open_address, parse_url
from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.adapters.veil import PORT_DEFAULT as VEIL_PORT
from veilmq.client.adapters.veil import VeilAccount
from veilmq.client.bridge import Bridge, Counts, Options, SetAside, check
from veilmq.client.bridge.carrying import Difference, differences
from veilmq.client.errors import ServiceError, TransportError
from veilmq.client.messages import Message, Sent, Stats, typed
from veilmq.client.queue import Account, Capabilities, Queue
from veilmq.client.shared import attempt
from veilmq.client.shared.checks import as_message
from veilmq.client.wrapping import Wrapping
from veilmq.model.errors import CapabilityMissing, ParameterInvalid, QueueMissing, UsageError, VeilError
from veilmq.model.instant import SECOND_US
from veilmq.model.settings.queue import QueueKey
from veilmq.model.wording import counted
from veilmq.store.directory import holds_database

_OF_SERVER: Final = re.compile("veil://[^/]")
_PREFIX: Final = "bridge."
_TLS_DEFAULT: Final = frozenset({"sqs", "azure"})
"""Kinds of addresses that speak TLS unless they say otherwise."""
_TOO_MANY: Final = 429
_FAILED: Final = 500
"""From here on a status is about the server."""


def bridge(given: Mapping[str, Any]) -> Exit:
    """Move or copy, or say what it would do. Raises Failure."""
    options = Options(
        copies=given["copies"], lease=seconds("--lease", given["lease"]), workers=given["workers"],
        rate=given["rate"], limit=given["limit"], until_empty=given["until_empty"], group=given["group"],
        give_up_after=seconds("--give-up-after", given["give_up_after"]), named=given["admin"] is not None,
    )  # fmt: skip
    urls, aside = _urls(given["source"], given["target"], os.environ), SetAside()
    with ExitStack() as stack:
        with failing("FROM"):
            start = stack.enter_context(_Side(urls[0], aside))
            source = stack.enter_context(start.queue())
            check(source, options)
            before = source.stats()
        if given["admin"] is not None and not _OF_SERVER.match(urls[1]):
            raise Failure(Exit.USAGE, "--admin: TO must be a queue of a VeilMQ server, veil://HOST:PORT/NAME")
        with failing("TO"):
            end = stack.enter_context(_Side(urls[1], aside, may_be_missing=True, creates=not given["dry_run"]))
            there = end.stats()
            if there is not None and start.is_same(end):
                raise ParameterInvalid(parameter="target", reason="is the same queue as the source")
        lost = differences(source.capabilities, end.capabilities, options.group, copies=options.copies)
        if given["dry_run"]:
            _show_plan((start, before), (end, there), lost, as_json=given["as_json"])
            return Exit.DONE
        _accept(lost, yes=given["yes"])
        with failing("TO"):
            target = stack.enter_context(end.queue())
            if given["admin"] is not None:
                target = stack.enter_context(once(target, given["admin"], given["token_file"], start.origin))
            run = Bridge(source, target, options, aside=aside)
        try:
            with failing(""):
                counts = _run(run, before)
                after = source.stats() if given["until_empty"] else None
        except Failure as failure:
            counts = run.counts()
            _show_end(counts, None, options, as_json=given["as_json"])
            if counts.received and failure.code is Exit.USAGE:
                failure.code = Exit.WRONG
            raise
    _show_end(counts, after, options, as_json=given["as_json"])
    return Exit.WRONG if counts.refused or counts.undeleted else Exit.DONE


def _urls(first: str | None, second: str | None, environment: Mapping[str, str]) -> tuple[str, str]:
    """FROM and TO: as given, and what is not given from the variables. Raises Failure."""
    start, end = environment.get("VEILMQ_FROM"), environment.get("VEILMQ_TO")
    if first and second:
        return first, second
    if first and start and end:
        text = "one URL is given, but VEILMQ_FROM and VEILMQ_TO are both set: is it FROM or TO?"
        raise Failure(Exit.USAGE, text, "Give both URLs, none, or unset one of the variables.")
    found = (start, first or end) if start else (first, end)
    if not (found[0] and found[1]):
        missing = "TO" if found[0] else "FROM"
        text = f"{missing} is missing: veilmq bridge FROM TO"
        raise Failure(Exit.USAGE, text, "A URL with a secret can be given as VEILMQ_FROM or VEILMQ_TO.")
    return found[0], found[1]


class _Side:
    """One end of a bridge: its account, and its queue, which need not be there yet. Raises what `connect` does."""

    def __init__(self, url: str, aside: SetAside, *, may_be_missing: bool = False, creates: bool = False) -> None:
        """creates: a data directory may be made now; False: one that is missing is only described."""
        self._account: Account | type[EmbeddedAccount]
        self.origin = ""
        """The queue as its URL names it, without secrets."""
        self._places: frozenset[tuple[str, int]] = frozenset()
        """Of its servers; a directory has none."""
        self._owner: tuple[str | None, ...] = ()
        """Decides at such a server whose queue it is, where a queue has no ARN."""
        if url.startswith(("amqp://", "amqps://")):
            from veilmq.client.bridge.rabbitmq import open_rabbitmq

            self._account, name, create = open_rabbitmq(url)
            parts, parameters = urlsplit(url), self._account.parameters
            self._places = frozenset({(_host(parameters.host), parameters.port)})
            self._owner = ("amqp", parameters.virtual_host)
            self.origin = f"amqp {parts.hostname}:{parts.port} {parts.path} {name}"
        else:
            address = parse_url(url, also_named=("amqp", "amqps"))
            name, create = address.queue, address.create
            self._places, self._owner = _places(address), (address.kind, address.account, address.key)
            self._account = EmbeddedAccount
            directory = None if address.directory is None else Path(address.directory)
            where = f"{address.host}:{address.port}" if directory is None else str(directory.resolve())
            self.origin = f"{address.kind} {where} {address.account} {address.region} {name}"
            if directory is not None and create and not creates and not holds_database(directory):
                check_directory(directory, "TO")
            else:
                self._account = open_address(msgspec.structs.replace(address, create=create and creates), aside)
        if name is None:
            self._close()
            raise ParameterInvalid(parameter="url", reason="names no queue")
        self.name, self._may_be_missing = name, may_be_missing and create

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if not isinstance(self._account, type):
            self._account.close()

    @property
    def capabilities(self) -> Capabilities:
        """What a queue of that name can do."""
        return self._account.capabilities(self.name)

    def stats(self) -> Stats | None:
        """None if it is not there and may be created. Raises QueueMissing."""
        if isinstance(self._account, type):
            return None
        try:
            with self._account.queue(self.name) as queue:
                return queue.stats()
        except QueueMissing:
            if self._may_be_missing:
                return None
            raise

    def is_same(self, other: "_Side") -> bool:
        """Whether both are one queue of one server, however the URLs name it. Raises as `stats`."""
        return not self._places.isdisjoint(other._places) and self._way() == other._way()

    def _way(self) -> tuple[str | None, ...]:
        """What names the queue at its server."""
        arn = getattr(self._account, "arn", None)
        return (*self._owner, self.name) if arn is None else (arn(self.name),)

    def queue(self) -> Queue:
        """The queue, created if it may be missing and its URL says so. Raises QueueMissing."""
        assert not isinstance(self._account, type), "a dry run opens no queue"
        try:
            return self._account.queue(self.name)
        except QueueMissing:
            if not self._may_be_missing:
                raise
            self._account.create(self.name)
            return self._account.queue(self.name)


def _places(address: Address) -> frozenset[tuple[str, int]]:
    """Host and port of each server of an address; all names of this machine are one."""
    if address.kind == "embedded":
        return frozenset()
    tls = address.kind in _TLS_DEFAULT if address.tls is None else address.tls
    default = VEIL_PORT if address.kind == "veil" else 443 if tls else 80
    hosts = ((address.host, address.port), *address.others)
    return frozenset((_host(host), port or default) for host, port in hosts)


def _host(host: str | None) -> str:
    """Empty: the service's own."""
    shown = (host or "").lower()
    return "localhost" if is_here(f"//[{shown}]" if ":" in shown else f"//{shown}") else shown


_ADVICE_CREDENTIALS: Final = (
    "Name them in the URL, sqs://KEY:SECRET@HOST:PORT/, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY:"
    " a server in development mode takes any."
)
_OPTIONS: Final = ("workers", "lease", "rate", "limit", "group")


@contextmanager
def failing(side: str) -> Iterator[None]:
    """Raises Failure, which shows no secret, with the exit code of what went wrong. side: what the command line calls
    the end that is at fault; empty: either."""
    named = f"{side}: " if side else ""
    try:
        yield
    except ParameterInvalid as error:
        named = f"--{error.parameter}: " if error.parameter in _OPTIONS else named
        raise Failure(Exit.USAGE, f"{named}{error.reason}") from None
    except QueueMissing as error:
        advice = "Create it first, or end its URL with ?create=1." if side == "TO" else ""
        raise Failure(Exit.USAGE, f"{named}{error}", advice) from None
    except (UsageError, CapabilityMissing) as error:
        raise Failure(Exit.USAGE, f"{named}{error}") from None
    except TransportError as error:
        advice = "" if side else "What the target has not acknowledged is still at the source: run it again."
        raise Failure(Exit.ADDRESS, f"{named}{error}", advice) from None
    except VeilError as error:
        if isinstance(error, ServiceError) and error.code == "NoCredentialsError":
            raise Failure(Exit.USAGE, f"{named}no credentials", _ADVICE_CREDENTIALS) from None
        raise Failure(Exit.WRONG, f"{named}{error}") from None


def _accept(lost: list[Difference], *, yes: bool) -> None:
    """Say what is lost; ask if anything of the senders' is. Raises Failure."""
    for each in lost:
        print(f"{'LOST' if each.is_lost else 'note'}: {each.text}", file=sys.stderr)
    if any(each.is_lost for each in lost):
        if not yes and not sys.stdin.isatty():
            raise Failure(Exit.USAGE, "the target cannot carry what is LOST above", "Use --yes to accept that.")
        confirm("Go on without what is LOST?", yes)


def _run(run: Bridge, before: Stats) -> Counts:
    """Run it; the first SIGINT or SIGTERM ends it in order."""
    total = before.visible + (before.in_flight or 0) + (before.delayed or 0)
    earlier: dict[signal.Signals, Any] = {}

    def end(number: int, frame: FrameType | None) -> None:
        for each, handler in earlier.items():
            signal.signal(each, handler)
        print("ending: the messages received so far are still moved; Ctrl-C again ends at once", file=sys.stderr)
        run.stop()

    for each in (signal.SIGINT, signal.SIGTERM):
        earlier[each] = signal.signal(each, end)
    try:
        with bar() as advance:
            return run.run(lambda counts: advance("messages", counts.sent, max(total, counts.received)))
    finally:
        for each, handler in earlier.items():
            signal.signal(each, handler)


def _show_plan(
    source: tuple[_Side, Stats], target: tuple[_Side, Stats | None], lost: list[Difference], *, as_json: bool
) -> None:
    sides: dict[str, tuple[_Side, Stats | None]] = {"from": source, "to": target}
    if as_json:
        shown: dict[str, Any] = {
            name: {"queue": side.name, "protocol": side.capabilities.protocol, "holds": stats and _left(stats)}
            for name, (side, stats) in sides.items()
        }
        shown["lost"] = [each.text for each in lost if each.is_lost]
        shown["notes"] = [each.text for each in lost if not each.is_lost]
        print_json(shown)
        return
    for name, (side, stats) in sides.items():
        held = "would be created" if stats is None else _counts(stats)
        print(f"{name:<4}  {printable(side.name)} ({side.capabilities.protocol}): {held}")
    for each in lost:
        print(f"{'LOST' if each.is_lost else 'note'}  {each.text}")
    print("nothing was changed: this was a dry run")


def _counts(stats: Stats) -> str:
    if stats.in_flight is None:  # Azure does not tell them apart
        return counted(stats.visible, "message")
    return f"{stats.visible} visible, {stats.in_flight} in flight, {stats.delayed or 0} delayed"


def _show_end(counts: Counts, after: Stats | None, options: Options, *, as_json: bool) -> None:
    if as_json:
        print_json(msgspec.to_builtins(counts) | ({} if after is None else {"left": _left(after)}))
        return
    done = f"{'copied' if options.copies else 'moved'} {counts.sent}"
    more = {
        "the target had already": counts.duplicates, "refused": counts.refused,
        "perhaps twice at the target": counts.uncertain, "not deleted at the source": counts.undeleted,
    }  # fmt: skip
    print(", ".join([done, *(f"{name} {number}" for name, number in more.items() if number)]))
    for reason, number in counts.reasons.items():
        print(f"refused {number}: {printable(reason)}", file=sys.stderr)
    if after is not None and any(_left(after).values()) and not options.copies:
        print(f"left at the source: {_counts(after)}", file=sys.stderr)


def _left(stats: Stats) -> dict[str, int | None]:
    return {"visible": stats.visible, "in_flight": stats.in_flight, "delayed": stats.delayed}


class Once(Wrapping):
    """The queue `inner`, to which messages go by way of the admin port. Each needs a deduplication id."""

    def __init__(self, inner: Queue, target: Target, source: str) -> None:
        """inner: of our server. source: names the source, the same in each run.

        Raises Failure if the server does not answer, or has no such queue.
        """
        super().__init__(inner)
        self._target = target
        self._own = threading.local()
        self._opened: list[HttpAccess] = []
        account = inner.account
        assert isinstance(account, VeilAccount)
        # As the queue's own port has it: the admin port may know several accounts, and another home region.
        *_, region, owner, name = account.arn(inner.name).split(":")
        self._key = QueueKey(owner, region, name)
        now = self._access().run("describe", self._key, {})
        self._way = (source, str(self._key), now["incarnation"], now.get("purged"))
        if inner.capabilities.native_fifo:
            raise Failure(Exit.USAGE, "--admin: not for a FIFO queue, which deduplicates by itself")

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """One command for each message."""
        return [attempt(self.send, each) for each in messages]

    def send(self, message: str | Message) -> Sent:
        """One command. Raises TransportError, ServiceError, QueueMissing, ParameterInvalid."""
        given = as_message(message)
        members = _members(given)
        facts = json.dumps([*self._way, given.deduplication_id, members["body"]])
        command = f"{_PREFIX}{hashlib.sha256(facts.encode()).hexdigest()}"
        try:
            access = self._access()
            (shown,) = access.run("send", self._key, {"messages": [members]}, command)["messages"]
        except Missing as error:
            raise QueueMissing(queue=self.name) from error
        except Failure as error:
            if error.answered is not None and "idempotency_key_reused" in error.answered:
                return Sent(id="", duplicate=True)
            raise self._error(error) from error
        return Sent(id=str(shown["id"]), duplicate=access.replayed)

    def _error(self, failure: Failure) -> TransportError | ServiceError:
        """Why a message was not sent. A repetition acts once, so whether it may have happened does not matter."""
        status, code, request_id = failure.answered or (_FAILED, "", "")
        if code == "not_authenticated":
            self._own.access = None
        if status >= _FAILED or status == _TOO_MANY or code == "not_authenticated":
            return TransportError(reason=str(failure), may_have_happened=False)
        return ServiceError(code=code, status=status, request_id=request_id, message=str(failure))

    def _access(self) -> HttpAccess:
        access: HttpAccess | None = getattr(self._own, "access", None)
        if access is None:
            access = http_access(self._target, os.environ)
            assert access is not None, "an address was given"
            self._own.access = access
            self._opened.append(access)
        return access

    def close(self) -> None:
        """Close the connections, and the queue."""
        for access in self._opened:
            access.close()
        super().close()


def once(inner: Queue, admin: str, token_file: Path | None, source: str) -> Once:
    """Raises Failure."""
    return Once(inner, Target(admin, token_file, None), source)


def _members(message: Message) -> Mapping[str, Any]:
    """As /api/v1 has them (`MessageInput`)."""
    given = replace(message, deduplication_id=None)
    return {
        "body": given.body,
        "ttl_us": None if given.ttl is None else round(given.ttl * SECOND_US),
        "priority": given.priority,
        "group": given.group,
        "type": given.type,
        "attributes": [_attribute(name, value) for name, value in given.attributes.items()],
    }


def _attribute(name: str, value: Any) -> dict[str, str]:
    kind, content = typed(name, value)
    text = content if isinstance(content, str) else base64.b64encode(content).decode()
    return {"name": name, "value": text, "type": kind}
