"""A data port: a codec on one side, the shell on the other.

Strategy: every request is decoded on the loop and either answered there (refused, denied) or submitted as one call; the
`Conversation` is the call's ticket and writes the response. If a client hangs up, its parked receive is dropped, and
messages that could not be delivered are released at once. If it only ends its input, its parked receive is answered
empty.

Before grants are checked, the queue of a command and the queues in its settings (dead letters, the endpoint of a
subscription) are looked up by their aliases. Everything after that sees one name per queue. The endpoint text that an
owner wrote stays unchanged.
"""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol
from urllib.parse import unquote_to_bytes

import msgspec

from veilmq.cluster import Calls
from veilmq.engine.long_polls import Unread
from veilmq.model.commands import (
    AnyCommand,
    CancelMove,
    ChangeQueue,
    ChangeSubscription,
    ChangeTopic,
    CreateQueue,
    CreateTopic,
    Delete,
    DeleteQueue,
    DeleteTopic,
    DescribeQueue,
    DescribeSubscription,
    DescribeTopic,
    Extend,
    ListMoves,
    ListQueues,
    ListSubscriptions,
    ListTopics,
    Peek,
    Publish,
    PurgeQueue,
    Receive,
    Send,
    StartJob,
    StartMove,
    Subscribe,
    Unsubscribe,
)
from veilmq.model.errors import Overloaded
from veilmq.model.instant import Instant
from veilmq.model.outcomes import Outcome, Received
from veilmq.model.settings.access import EVERYTHING, AccessKey, Action, Keyring
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols import Request, Response
from veilmq.server.auth import Hosts
from veilmq.server.clock import wall
from veilmq.server.http.exchange import Exchange
from veilmq.server.logs import RefusalLog

Aliases = Mapping[QueueKey, QueueKey]
"""Alias -> the queue's own name."""

NO_ALIASES: Final[Aliases] = MappingProxyType({})
_NO_QUEUE: Final = QueueKey("", "", "")


def call_by_own_names(commands: Sequence[AnyCommand], aliases: Aliases) -> None:
    """Change the commands in place."""
    for command in commands:
        own = aliases.get(getattr(command, "queue", _NO_QUEUE))
        if own is not None:
            command.queue = own  # type: ignore[union-attr]
        rewrite = _REWRITES.get(type(command))
        if rewrite is not None:
            rewrite(command, aliases)


def _queue(command: CreateQueue | ChangeQueue, aliases: Aliases) -> None:
    redrive = command.change.get("redrive")
    if redrive is not None and redrive.target in aliases:
        target = aliases[redrive.target]
        command.change = command.change | {"redrive": msgspec.structs.replace(redrive, target=target)}


def _subscribe(command: Subscribe, aliases: Aliases) -> None:
    settings = command.settings
    named = {"queue": settings.queue, "dead_letter_queue": settings.dead_letter_queue}
    own = {name: aliases[key] for name, key in named.items() if key is not None and key in aliases}
    if own:
        command.settings = msgspec.structs.replace(settings, **own)


def _change_subscription(command: ChangeSubscription, aliases: Aliases) -> None:
    own = aliases.get(command.change.get("dead_letter_queue") or _NO_QUEUE)
    if own is not None:
        command.change = command.change | {"dead_letter_queue": own}


_REWRITES: Final[dict[type, Callable[[Any, Aliases], None]]] = {
    CreateQueue: _queue,
    ChangeQueue: _queue,
    Subscribe: _subscribe,
    ChangeSubscription: _change_subscription,
}

ACTIONS: Final[dict[type, Action]] = {
    Send: Action.SEND,
    Receive: Action.RECEIVE,
    Extend: Action.EXTEND,
    Delete: Action.DELETE,
    Peek: Action.PEEK,
    PurgeQueue: Action.PURGE,
    CreateQueue: Action.CREATE_QUEUE,
    ChangeQueue: Action.CHANGE_QUEUE,
    DeleteQueue: Action.DELETE_QUEUE,
    DescribeQueue: Action.DESCRIBE_QUEUE,
    ListQueues: Action.LIST_QUEUES,
    StartMove: Action.MOVE,
    CancelMove: Action.MOVE,
    ListMoves: Action.DESCRIBE_QUEUE,
    Publish: Action.PUBLISH,
    CreateTopic: Action.MANAGE_TOPICS,
    ChangeTopic: Action.MANAGE_TOPICS,
    DeleteTopic: Action.MANAGE_TOPICS,
    Subscribe: Action.MANAGE_TOPICS,
    ChangeSubscription: Action.MANAGE_TOPICS,
    Unsubscribe: Action.MANAGE_TOPICS,
    DescribeTopic: Action.DESCRIBE_TOPICS,
    ListTopics: Action.DESCRIBE_TOPICS,
    DescribeSubscription: Action.DESCRIBE_TOPICS,
    ListSubscriptions: Action.DESCRIBE_TOPICS,
}
"""The action that a key must be granted for each command."""


def _redrive_targets(command: CreateQueue | ChangeQueue) -> tuple[QueueKey | None, ...]:
    redrive = command.change.get("redrive")
    return () if redrive is None else (redrive.target,)


_OF_ENTRIES: Final = frozenset({Send, Delete, Extend})
"""Commands of which a request may have several, for one queue."""
_OF_MESSAGES: Final = frozenset({Peek, Receive})
"""Commands whose answers have messages."""
_TARGETS: Final[dict[type, Callable[[Any], tuple[QueueKey | None, ...]]]] = {
    CreateQueue: _redrive_targets,
    ChangeQueue: _redrive_targets,
    Subscribe: lambda command: (command.settings.queue, command.settings.dead_letter_queue),
    ChangeSubscription: lambda command: (command.change.get("dead_letter_queue"),),
}
"""The queues to which a command's settings point."""


def denied_action(key: AccessKey, commands: Sequence[AnyCommand]) -> Action | None:
    """The first action among the commands that the key was not granted."""
    kind = before = None
    for command in commands:
        named = getattr(command, "queue", None) or getattr(command, "topic", None)
        if named is before and type(command) is kind and kind in _OF_ENTRIES:
            continue  # the entries of a batch, which were granted with the first
        kind, before = type(command), named
        action = ACTIONS[kind]
        if not key.allows(action, None if named is None else named.name):
            return action
        if not may_send_to_targets(key, action, command):
            return Action.SEND
    return None


def may_send_to_targets(key: AccessKey, action: Action, command: AnyCommand) -> bool:
    """Whether the key may send messages where the command's settings point: it needs `send` or the same action there.

    Otherwise a key could send to any queue by making it the dead-letter queue or endpoint of its own. A move task or
    job needs `send`.
    """
    if isinstance(command, StartMove | StartJob):
        return command.destination is None or key.allows(Action.SEND, command.destination.name)
    targets = _TARGETS.get(type(command))
    return targets is None or all(
        each is None or key.allows(Action.SEND, each.name) or key.allows(action, each.name) for each in targets(command)
    )


_GIST_BYTES: Final = 800
"""How much of a refusal the log shows: a value of 256 characters, with escapes, and the reason after it."""
_SHOWN_BYTES: Final = 200
"""How much of a path or action the log shows."""
_HOST_SHOWN_BYTES: Final = 100
_ACTION: Final = re.compile(rb"[?&]Action=([A-Za-z]{1,64})")
_CLAIMED: Final = re.compile(rb"(?:Credential=|MNS |SharedKey(?:Lite)? )([^/:,\s]{1,128})")
"""The id of a key in the Authorization header of each protocol."""
_CLAIMED_IN_QUERY: Final = re.compile(rb"[?&]X-Amz-Credential=([^/&]{1,384}?)(?:/|%2[Ff]|&|$)")
"""The same for SQS with the signature in the query string, still encoded."""
_SERVICE: Final = re.compile(rb"(?:/|%2[Ff])([a-z0-9-]{1,64})(?:/|%2[Ff])aws4_request")
"""The AWS service that a request was signed for."""
_CODE: Final = re.compile(rb'<Code>([\w.]{1,64})<|"__type":"(?:[\w.]{1,64}#)?(\w{1,64})"')
"""The code in a refusal, in XML and in JSON."""
_MESSAGE: Final = re.compile(rb"<Message>([^<\n]+)")
"""The first line of what a refusal in XML says. In Azure's, lines with id and time follow."""
_HOST_REFUSED: Final = (
    "In development mode this server answers only to loopback names, not to %s: use 127.0.0.1 or localhost, or start "
    "it with --dev-host NAME in a private network, with --base-domain NAME or with --credentials FILE."
)
_PAGE_REFUSED: Final = (
    "In development mode no web page and no browser may call, unless --cors-origins lists the page's origin: use an "
    "SDK, curl, or the console at the admin port."
)

logger = logging.getLogger("veilmq.port")


class Call(Protocol):
    """A decoded request."""

    @property
    def key(self) -> AccessKey:
        """The key that signed it."""

    @property
    def verified(self) -> bool:
        """Whether it was signed; not if it only reads what the answer to a stranger needs."""

    @property
    def commands(self) -> tuple[AnyCommand, ...]:
        """Its commands; never empty."""


class Codec(Protocol):
    """One protocol: see veilmq.protocols."""

    def decode(self, request: Request, wall: Instant, arrived: Instant) -> Any:
        """A `Call`, or the Response of a request that needs no engine."""

    def encode(self, call: Any, outcomes: Sequence[Outcome]) -> Any:
        """The response to a call; or the next `Call`, if this one only fetched what authorization needs."""

    def denied(self, call: Any, action: Action) -> Response:
        """The response to a call that its key may not make."""

    def refuse(self, status: int, reason: str, request: Request | None = None) -> Response:
        """The response to a request that HTTP or the server's rules forbid."""

    def failure(self, request: Request) -> Response:
        """The answer when the server itself failed."""


class Port:
    """Serves one protocol on the shell's engine."""

    def __init__(
        self,
        name: str,
        codec: Codec,
        shell: Calls,
        unread: Unread,
        keyring: Keyring,
        hosts: Hosts,
        aliases: Aliases = NO_ALIASES,
    ) -> None:
        """shell: carries the calls out. unread: what clients have not read. aliases: further names of queues in this
        protocol -> the queues' own names."""
        self.name = name
        self._aliases = aliases
        self.codec = codec
        self.shell = shell
        self._unread = unread
        self._keyring = keyring
        self._hosts = hosts
        self.conversation: Callable[[Port, Exchange, Call, tuple[AnyCommand, ...]], Conversation] = Conversation
        self.commands: Counter[type] = Counter()
        """Commands submitted, by type."""
        self.others: dict[str, Counter[type]] = {}
        """Commands of other protocols that use this port, by protocol: `veil` uses that of SQS."""
        self._queries: set[asyncio.Task[None]] = set()
        self.waiting: set[Conversation] = set()
        """Receives that may wait and are not answered yet."""
        self._refusals = RefusalLog(name, logger)

    def handle(self, request: Request, exchange: Exchange) -> None:
        """The listener's handler."""
        shell = self.shell
        if not self._keyring.checks and not self._hosts.takes(request.host, request.headers):
            self._turn_away(request, exchange)
            return
        now = shell.now()
        call = self.codec.decode(request, wall(), shell.arrived(now))
        if type(call) is Response:
            if call.status >= 400 and self._refusals.takes(_reason(call)):
                extra = {"request": request.request_id}
                asked = _asked(request, self._keyring)
                logger.info("%s: %s: refused with %d: %s", self.name, asked, call.status, _gist(call), extra=extra)
            exchange.respond(call)
            return
        if call.verified:
            exchange.keep_place()
        self.proceed(call, exchange, now)

    def _turn_away(self, request: Request, exchange: Exchange) -> None:
        """Refuse a Host or Origin of development mode."""
        text = _PAGE_REFUSED
        if not self._hosts.takes(request.host, {}):
            text = _HOST_REFUSED % (request.host[:_HOST_SHOWN_BYTES].decode("latin-1") or "an empty Host")
        if self._refusals.takes("Host or Origin"):
            asked, extra = _asked(request, self._keyring), {"request": request.request_id}
            logger.info("%s: %s: refused with 403: %s", self.name, asked, text, extra=extra)
        exchange.respond(self.codec.refuse(403, text, request))

    def proceed(self, call: Call, exchange: Exchange, now: Instant) -> None:
        """Submit a call if its key was granted all its actions."""
        shell = self.shell
        commands = call.commands
        first = commands[0]
        kind = type(first)
        if self._aliases:
            call_by_own_names(commands, self._aliases)
        protocol = first.origin.protocol  # type: ignore[union-attr]  # what has none is no client's to ask
        counts = self.commands if protocol == self.name else self.others.setdefault(protocol, Counter())
        counts[kind] += len(commands)
        if call.key.grants is not EVERYTHING:
            action = denied_action(call.key, commands)
            if action is not None:
                if self._refusals.takes(f"{action} is not granted"):
                    extra = {"request": exchange.request.request_id}
                    shown = (self.name, call.key.id, action, _asked(exchange.request, self._keyring), _of(first))
                    logger.info("%s: %s may not %s: %s%s", *shown, extra=extra)
                exchange.respond(self.codec.denied(call, action))
                return
            last = commands[-1]  # a list is the only command, or follows the description of its dead-letter queue
            if type(last) is ListQueues or type(last) is ListTopics:
                last.granted = call.key.patterns(ACTIONS[type(last)])
        conversation = self.conversation(self, exchange, call, commands)
        if kind in _OF_MESSAGES:
            exchange.account = first.queue.account  # type: ignore[union-attr]  # both have a queue
            if type(first) is Peek:
                query = asyncio.ensure_future(self._query(conversation, first))
                self._queries.add(query)
                query.add_done_callback(self._queries.discard)
                return
            if type(first) is Receive and first.wait_us != 0:
                exchange.on_gone = conversation.gone
                self.waiting.add(conversation)
                exchange.request.body = b""  # it may have megabytes, which nobody needs while the receive waits
        shell.submit(conversation, now)

    def refuses_now(self, key: AccessKey, command: Receive) -> bool:
        """Whether the credentials, which may have been reloaded since, no longer have the key or no longer let it
        receive."""
        if not self._keyring.checks:
            return False
        found = self._keyring.find(key.id)
        return found is not key and not (
            found is not None and key.is_still(found) and found.allows(Action.RECEIVE, command.queue.name)
        )

    def end_waits(self) -> None:
        """The credentials were read again: answer the receives that they no longer allow. If one went on waiting, it
        would take the next message and give it back, which counts as a receive."""
        for each in list(self.waiting):
            command = each.commands[0]
            if type(command) is Receive and self.refuses_now(each.key, command):
                self.shell.answer_soon(each)

    async def _query(self, conversation: "Conversation", command: Peek) -> None:
        """Answer from committed state, beside the batches."""
        outcome = await self.shell.query(command)
        unread = self._unread
        if unread.near and unread.refuses(command.queue.account):
            unread.refused += 1
            outcome = Overloaded(limit=unread.bytes_max)
        conversation.answer([outcome])


def _reason(response: Response) -> str:
    """Status and code of a refusal."""
    found = _CODE.search(response.body, 0, _GIST_BYTES)
    return f"{response.status} {(found[1] or found[2]).decode()}" if found else str(response.status)


def _gist(response: Response) -> str:
    """The code and message of a refusal in XML, else its beginning. It contains no secret: the client gets it."""
    text = response.body[:_GIST_BYTES]
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if code and code[1] and message:
        text = code[1] + b": " + message[1]
    return text.decode("utf-8", "replace").rstrip()


def _of(command: AnyCommand) -> str:
    named = getattr(command, "queue", None) or getattr(command, "topic", None)
    return "" if named is None else f" of {named}"


def _asked(request: Request, keyring: Keyring) -> str:
    """Who asks for what, according to the request's head.

    Names only ids of existing keys: an unknown id may be a misplaced secret.
    """
    in_query = _ACTION.search(request.target)
    action = request.headers.get(b"x-amz-target", in_query[1] if in_query else b"")
    authorization = request.headers.get(b"authorization")
    if authorization is None:
        claimed = _CLAIMED_IN_QUERY.search(request.target)
    else:
        claimed = _CLAIMED.search(authorization)
    key = keyring.find(unquote_to_bytes(claimed[1]).decode("latin-1")) if claimed and keyring.checks else None
    parts = [part[:_SHOWN_BYTES].decode("latin-1") for part in (request.path, action) if part]
    service = _SERVICE.search(request.target if authorization is None else authorization)
    if service and service[1] != b"sqs":
        parts.append(f"signed for {service[1].decode()}")
    return f"{request.method} {' '.join(parts)} from {request.peer}" + (f" by {key.id}" if key else "")


class Conversation:
    """One request whose commands are with the engine."""

    __slots__ = ("_call", "_exchange", "_port", "commands")

    def __init__(self, port: Port, exchange: Exchange, call: Call, commands: tuple[AnyCommand, ...]) -> None:
        self._port = port
        self._exchange = exchange
        self._call = call
        self.commands = commands

    @property
    def key(self) -> AccessKey:
        """The key that signed it."""
        return self._call.key

    def answer(self, outcomes: list[Outcome]) -> None:
        """Write the response; release messages that could not be delivered."""
        exchange = self._exchange
        command = self.commands[0]
        if type(command) is Receive and command.wait_us != 0:
            self._port.waiting.discard(self)
            if self._port.refuses_now(self._call.key, command):
                exchange.respond(self._port.codec.denied(self._call, Action.RECEIVE))
                self._release(outcomes)
                return
        try:
            response = self._port.codec.encode(self._call, outcomes)
            if type(response) is not Response:
                self._port.proceed(response, exchange, self._port.shell.now())
                return
        except Exception:  # the request's edge: a failed response must not stop the others
            logger.exception("a request could not be answered", extra={"request": exchange.request.request_id})
            exchange.respond(self._port.codec.failure(exchange.request))
            self._release(outcomes)
            return
        if not exchange.respond(response):
            self._release(outcomes)

    def _release(self, outcomes: list[Outcome]) -> None:
        command, outcome = self.commands[0], outcomes[0]
        if type(command) is Receive and type(outcome) is Received and outcome.messages:
            self._port.shell.undeliver(command, outcome)

    def gone(self) -> None:
        """The client hung up; or it only stopped sending, and may still read its answer."""
        if self._exchange.gone:
            self._port.waiting.discard(self)
            self._port.shell.cancel(self)
        else:
            self._port.shell.answer_soon(self)
