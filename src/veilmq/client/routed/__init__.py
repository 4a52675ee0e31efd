"""A queue and a timeout for each type of message, behind one `Queue`.

Strategy: a table of routes, and a function that returns a message's type; a message without a route goes to the default
one. A handle contains its queue's name, so any process with the same table can use it. A receive first asks all queues
without waiting, each for its share, starting with a different one each time; then it waits (`waiting`).

Source: the documents' advice that types with different processing times belong in separate queues, and the pipeline's
`split`.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from veilmq.client.clock import SYSTEM, Clock
from veilmq.client.messages import Extension, Message, Peeked, Received, Recommended, Sent, Stats, Template
from veilmq.client.queue import Account, Capabilities, HandleOnSend, Queue, identity_of, is_closed
from veilmq.client.routed.parked import Parked
from veilmq.client.shared import attempt, checks
from veilmq.client.shared.checks import as_message
from veilmq.client.shared.lifetimes import Closing
from veilmq.client.unreadable import log
from veilmq.model.errors import ParameterInvalid, QueueExists, ReceiptInvalid, VeilError
from veilmq.model.messages import Failure

T = TypeVar("T")
R = TypeVar("R")

By = Callable[[Message], str | None]
"""Returns a message's type; None: it has none."""

_NAME_CHARACTERS_MAX: Final = 63
"""Azure's limit on a queue's name, the shortest of all."""
_SEPARATOR: Final = ":"
"""Between a queue's name and the handle; no cloud allows it in a name."""


def by_type(message: Message) -> str | None:
    """The default: `Message.type`."""
    return message.type


class Route(msgspec.Struct, frozen=True):
    """A queue, and the first lease of its messages."""

    queue: Queue
    lease: float | None = None
    """Seconds, for receives that name none; None: the queue's visibility timeout."""


class RoutedQueue(Closing):
    """A `Queue` made of several, one for each type. Any thread."""

    def __init__(
        self,
        routes: Mapping[str, Queue | Route],
        default: Queue | Route,
        *,
        by: By = by_type,
        name: str | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        """routes: message type to queue; several types may share one. default: for messages without a type or with any
        other. by: returns a message's type; default: `Message.type`. name: of the whole; None: the default queue's.
        Raises ParameterInvalid: two queues of one name, or two leases for one queue."""
        checks.function(by, "by")
        checks.object_with(routes, "routes", "items")
        self._default = _route(default, "default")
        self._by = by
        self._name = None if name is None else checks.text(name, "name")
        self._by_type = {kind: _route(route, f"routes[{kind!r}]") for kind, route in routes.items()}
        self._by_queue: dict[str, Route] = {}
        for route in [self._default, *self._by_type.values()]:
            known = self._by_queue.setdefault(route.queue.name, route)
            if known.queue is not route.queue or known.lease != route.lease:
                reason = f"queue {route.queue.name} is there twice, with other leases or as another object"
                raise ParameterInvalid(parameter="routes", reason=reason)
        self._routes = list(self._by_queue.values())
        self._turn = itertools.count()
        self._parked = Parked([route.queue.name for route in self._routes], self._poll, self._give_back, clock)

    @classmethod
    def create(
        cls,
        account: Account,
        base_name: str,
        split: Sequence[Mapping[str, Any]],
        *,
        template: Template | None = None,
        by: By = by_type,
        clock: Clock = SYSTEM,
    ) -> "RoutedQueue":
        """Create the queues of a split, and route to them: `base_name` itself for all other types, and one for each
        entry `{"types": ["resize", "crop"], "visibility_timeout": 30}` (seconds), as the pipeline's `split` returns
        them.

        A queue's name follows from its types, so the next split with the same types finds it again; if its visibility
        timeout differs by then, receives name the split's. template: the other settings of all queues. Raises
        ParameterInvalid for an invalid split, before anything is created; else what `Account.create` raises.
        """
        checks.object_with(account, "account", "create")
        base_name = checks.text(base_name, "base_name")
        groups = [_group(place, entry) for place, entry in enumerate(checks.batch(split, "split"))]
        seen: set[str] = set()
        for place, (types, _) in enumerate(groups):
            if twice := seen & set(types):
                raise ParameterInvalid(parameter=f"split[{place}].types", reason=f"{min(twice)!r} is there twice")
            seen |= set(types)
        settings = checks.template(template)
        if base_name.endswith(".fifo") and not settings.fifo:
            settings = msgspec.structs.replace(settings, fifo=True)
        account.create(base_name, settings)
        routes: dict[str, Queue | Route] = {}
        for types, timeout in groups:
            name = queue_name(base_name.removesuffix(".fifo"), types) + (".fifo" if settings.fifo else "")
            lease = None
            try:
                account.create(name, msgspec.structs.replace(settings, visibility_timeout=timeout))
            except QueueExists as error:
                if error.setting != "visibility_timeout":
                    raise
                lease = timeout
            route = Route(account.queue(name), lease)
            routes |= dict.fromkeys(types, route)
        return cls(routes, account.queue(base_name), by=by, name=base_name, clock=clock)

    @property
    def name(self) -> str:
        return self._default.queue.name if self._name is None else self._name

    @property
    def account(self) -> Account:
        """The default queue's."""
        return self._default.queue.account

    @property
    def capabilities(self) -> Capabilities:
        """What all of the queues can do."""
        return weakest([route.queue.capabilities for route in self._routes])

    @property
    def identity(self) -> Hashable:
        """See `veilmq.client.queue`: its queues with their leases."""
        return "routed", frozenset((identity_of(route.queue), route.lease) for route in self._routes)

    @property
    def closed(self) -> bool:
        """Whether one of its queues is closed."""
        return any(is_closed(route.queue) for route in self._routes)

    @property
    def queues(self) -> list[Queue]:
        """Each of them once."""
        return [route.queue for route in self._routes]

    @property
    def routes(self) -> Mapping[str, Route]:
        """By type."""
        return dict(self._by_type)

    def route(self, message: str | Message) -> Route:
        """Where a message goes. Raises what `by` raises, and ParameterInvalid if it returns what cannot be a type."""
        kind = self._by(as_message(message))
        try:
            return self._default if kind is None else self._by_type.get(kind, self._default)
        except TypeError:
            reason = f"must return a message's type or None, not {type(kind).__name__}"
            raise ParameterInvalid(parameter="by", reason=reason) from None

    def send(self, message: str | Message) -> Sent:
        queue = self.route(message).queue
        return _named(queue, queue.send(message))

    def send_batch(self, messages: Sequence[str | Message]) -> list[Sent | VeilError]:
        """See `Queue.send_batch`. One batch a queue; messages of one queue keep their order. A message at which `by`
        raises gets ParameterInvalid."""

        def send(queue: Queue, group: list[str | Message]) -> list[Sent | VeilError]:
            return [_named(queue, answer) if isinstance(answer, Sent) else answer for answer in queue.send_batch(group)]

        return self._grouped([(self._queue_of(message), message) for message in checks.batch(messages)], send)

    def receive(self, count_max: int = 1, *, lease: float | None = None, wait: float = 0) -> list[Received]:
        """See `Queue.receive`. Waits on all queues at once, and ends the other waits when one has a message."""
        able = self.capabilities
        checks.whole(count_max, "count_max", 1, able.receive_messages_max)
        checks.seconds(wait, "wait", 0, able.wait_max)
        found = self._look(count_max, lease)
        if found or not wait:
            return found
        if len(self._routes) == 1:
            return self._ask(self._routes[0], count_max, lease, wait)
        found = self._parked.wait(lease, wait, count_max)
        if found and len(found) < count_max:
            try:
                found += self._look(count_max - len(found), lease)
            except VeilError as error:
                log.warning("queue %s: %s", self.name, error)
        return found

    def extend(self, handle: str, lease: float, *, body: str | None = None) -> str:
        queue, inner = self._split(handle)
        return _joined(queue, queue.extend(inner, lease, body=body))

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:

        def extend(queue: Queue, group: list[Extension]) -> list[str | VeilError]:
            inner = [Extension(self._split(each.handle)[1], each.lease) for each in group]
            return [
                answer if isinstance(answer, VeilError) else _joined(queue, answer)
                for answer in queue.extend_batch(inner)
            ]

        def queue_of(each: Extension) -> Queue:
            return self._split(checks.extension(each).handle)[0]

        return self._grouped(
            [(attempt(queue_of, each), each) for each in checks.batch(extensions, "extensions")], extend
        )

    def release(self, handle: str, delay: float = 0, *, failure: Failure | None = None) -> None:
        queue, inner = self._split(handle)
        queue.release(inner, delay, failure=failure)

    def delete(self, handle: str) -> None:
        queue, inner = self._split(handle)
        queue.delete(inner)

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:

        def delete(queue: Queue, group: list[str]) -> list[VeilError | None]:
            return queue.delete_batch([self._split(handle)[1] for handle in group])

        return self._grouped([(self._queue_for(handle), handle) for handle in checks.batch(handles, "handles")], delete)

    def peek(self, count_max: int = 1) -> list[Peeked]:
        checks.whole(count_max, "count_max", 1, self.capabilities.receive_messages_max)
        found: list[Peeked] = []
        for route in self._in_turn():
            if len(found) < count_max:
                found += route.queue.peek(count_max - len(found))
        return found

    def stats(self) -> Stats:
        """See `Queue.stats`. Sums; a setting only where all queues agree; every incarnation."""
        all_of = [route.queue.stats() for route in self._routes]
        return Stats(
            visible=sum(each.visible for each in all_of),
            delayed=_sum(each.delayed for each in all_of),
            in_flight=_sum(each.in_flight for each in all_of),
            visibility_timeout=_same(each.visibility_timeout for each in all_of),
            retention=_same(each.retention for each in all_of),
            delay=_same(each.delay for each in all_of),
            incarnation=_joint(each.incarnation for each in all_of),
        )

    def recommended(self) -> Recommended | None:
        """See `Queue.recommended`. For each type, the lease of its own queue; for all others, the default queue's."""
        found = {name: route.queue.recommended() for name, route in self._by_queue.items()}
        if all(each is None for each in found.values()):
            return None
        default = found[self._default.queue.name]
        by_type = dict(default.by_type) if default is not None else {}
        for kind, route in self._by_type.items():
            of_queue = found[route.queue.name]
            lease = None if of_queue is None else of_queue.by_type.get(kind, of_queue.lease)
            if lease is not None:
                by_type[kind] = lease
        why = "; ".join(each.why for each in found.values() if each is not None and each.why)
        applied = all(each is None or each.applied for each in found.values())
        return Recommended(None if default is None else default.lease, by_type, why, applied)

    def interrupt(self) -> None:
        """See `Queue.interrupt`. All of the queues."""
        self._parked.interrupt()
        for route in self._routes:
            route.queue.interrupt()

    def close(self) -> None:
        """See `Queue.close`. All of the queues."""
        self._parked.close()
        for route in self._routes:
            route.queue.close()

    def _look(self, count_max: int, lease: float | None) -> list[Received]:
        """Messages that are there now: a share from each queue, then the rest from the queues that had more.

        Raises the first queue's error if there are no messages; otherwise returns them, or their leases would be lost.
        """
        order = self._in_turn()
        share = -(-count_max // len(order))
        found: list[Received] = []
        fuller: list[Route] = []
        failure: VeilError | None = None
        # The first round asks for the shares, the second for the rest.
        for route, count in itertools.chain(
            ((route, share) for route in order), ((route, count_max) for route in fuller)
        ):
            count = min(count, count_max - len(found))
            if not count:
                break
            try:
                came = self._ask(route, count, lease, 0)
            except VeilError as error:
                failure = failure or error
                continue
            found += came
            if len(came) == count == share:
                fuller.append(route)
        if failure is not None:
            if not found:
                raise failure
            log.warning("queue %s: %s", self.name, failure)
        return found

    def _poll(self, name: str, lease: float | None, wait: float) -> list[Received]:
        return self._ask(self._by_queue[name], 1, lease, wait)

    def _ask(self, route: Route, count_max: int, lease: float | None, wait: float) -> list[Received]:
        queue = route.queue
        came = queue.receive(count_max, lease=route.lease if lease is None else lease, wait=wait)
        return [msgspec.structs.replace(each, handle=_joined(queue, each.handle)) for each in came]

    def _give_back(self, message: Received) -> None:
        self.release(message.handle)

    def _in_turn(self) -> list[Route]:
        """All routes, starting with the next one."""
        first = next(self._turn) % len(self._routes)
        return self._routes[first:] + self._routes[:first]

    def home(self, handle: str) -> tuple[Queue, str] | None:
        """The queue that a message came from, and its handle there; None: it is of none of these."""
        try:
            return self._split(handle)
        except VeilError:
            return None

    def _split(self, handle: Any) -> tuple[Queue, str]:
        name, separator, inner = checks.handle(handle).partition(_SEPARATOR)
        route = self._by_queue.get(name)
        if route is None or not separator:
            raise ReceiptInvalid(reason="it is of none of these queues")
        return route.queue, inner

    def _queue_of(self, message: str | Message) -> Queue | VeilError:
        try:
            return self.route(message).queue
        except VeilError as error:
            return error
        except Exception as error:  # noqa: BLE001 the application's own `by`: the other messages can be sent
            refused = ParameterInvalid(parameter="by", reason=f"raised {type(error).__name__}: {error}")
            refused.__cause__ = error
            return refused

    def _queue_for(self, handle: str) -> Queue | VeilError:
        try:
            return self._split(handle)[0]
        except VeilError as error:
            return error

    def _grouped(
        self, entries: Iterable[tuple[Queue | VeilError, T]], call: Callable[[Queue, list[T]], Sequence[R]]
    ) -> list[R | VeilError]:
        """Call `call` once for each queue with its entries; return the results in the entries' order."""
        results: list[Any] = []
        groups: dict[str, list[tuple[int, T]]] = {}
        for queue, entry in entries:
            if not isinstance(queue, VeilError):
                groups.setdefault(queue.name, []).append((len(results), entry))
            results.append(queue)
        anything = False
        for name, group in groups.items():
            try:
                answers: Sequence[Any] = call(self._by_queue[name].queue, [entry for _, entry in group])
            except VeilError as error:
                # A batch raises only if nothing of it happened; here a part may have happened.
                if not anything and len(groups) == 1:
                    raise
                answers = [error] * len(group)
            anything = True
            for (place, _), answer in zip(group, answers, strict=True):
                results[place] = answer
        return results


def queue_name(base_name: str, types: Sequence[str]) -> str:
    """The name of the queue for these types: readable, valid in every cloud, and always the same."""
    ordered = sorted(types)
    readable = re.sub("[^a-z0-9]+", "-", ordered[0].lower()).strip("-")
    suffix = readable
    if len(ordered) > 1 or readable != ordered[0]:
        digest = hashlib.sha256("\0".join(ordered).encode()).hexdigest()[:8]
        suffix = f"{readable}-{digest}" if readable else digest
    name = f"{base_name}-{suffix}"
    if len(name) > _NAME_CHARACTERS_MAX:
        name = f"{base_name}-{hashlib.sha256(suffix.encode()).hexdigest()[:16]}"
    return name


def weakest(all_of: Sequence[Capabilities]) -> Capabilities:
    """What all of them can do."""
    caps = [each.lease_total_max for each in all_of if each.lease_total_max is not None]
    never_first = list(HandleOnSend)
    return Capabilities(
        protocol=_joint(each.protocol for each in all_of) or "",
        body_bytes_max=min(each.body_bytes_max for each in all_of),
        batch_messages_max=min(each.batch_messages_max for each in all_of),
        receive_messages_max=min(each.receive_messages_max for each in all_of),
        lease_min=max(each.lease_min for each in all_of),
        release_min=max(each.release_min for each in all_of),
        lease_max=min(each.lease_max for each in all_of),
        lease_total_max=min(caps) if caps else None,
        wait_max=min(each.wait_max for each in all_of),
        delay_max=min(each.delay_max for each in all_of),
        batch_extend=all(each.batch_extend for each in all_of),
        receipts_rotate=any(each.receipts_rotate for each in all_of),
        handle_on_send=min((each.handle_on_send for each in all_of), key=never_first.index),
        body_replaceable=all(each.body_replaceable for each in all_of),
        retention_below_delay=all(each.retention_below_delay for each in all_of),
        base64_body=any(each.base64_body for each in all_of),
        attributes=all(each.attributes for each in all_of),
        attributes_max=min(each.attributes_max for each in all_of),
        fields_as_attributes=any(each.fields_as_attributes for each in all_of),
        peek=all(each.peek for each in all_of),
        priorities=all(each.priorities for each in all_of),
        ttl=all(each.ttl for each in all_of),
        groups=all(each.groups for each in all_of),
        native_fifo=all(each.native_fifo for each in all_of),
        native_topics=all(each.native_topics for each in all_of),
        lease_hints=all(each.lease_hints for each in all_of),
        tags=all(each.tags for each in all_of),
        body_bytes_min=max(each.body_bytes_min for each in all_of),
        extends_late=all(each.extends_late for each in all_of),
    )


def _route(given: Queue | Route, parameter: str) -> Route:
    if not isinstance(given, Route):
        return Route(checks.queue(given, parameter))
    checks.queue(given.queue, parameter)
    if given.lease is not None:
        checks.positive(given.lease, "lease")
    return given


def _group(place: int, entry: Any) -> tuple[list[str], float]:
    """(types, visibility timeout) of an entry of a split. Raises ParameterInvalid."""
    if not isinstance(entry, Mapping):
        raise ParameterInvalid(parameter=f"split[{place}]", reason="must have types and visibility_timeout")
    types, timeout = entry.get("types"), entry.get("visibility_timeout")
    if (
        isinstance(types, str)
        or not isinstance(types, Sequence)
        or not types
        or not all(isinstance(each, str) and each for each in types)
        or len(set(types)) != len(types)
    ):
        raise ParameterInvalid(parameter=f"split[{place}].types", reason="must be a list of different types")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ParameterInvalid(parameter=f"split[{place}].visibility_timeout", reason="must be seconds above 0")
    return list(types), timeout


def _named(queue: Queue, sent: Sent) -> Sent:
    return sent if sent.handle is None else msgspec.structs.replace(sent, handle=_joined(queue, sent.handle))


def _joined(queue: Queue, handle: str) -> str:
    return f"{queue.name}{_SEPARATOR}{handle}"


def _sum(values: Iterable[int | None]) -> int | None:
    listed = list(values)
    known = [each for each in listed if each is not None]
    return sum(known) if len(known) == len(listed) else None


def _same(values: Iterable[float | None]) -> float | None:
    different = set(values)
    return different.pop() if len(different) == 1 else None


def _joint(values: Iterable[str | None]) -> str | None:
    listed = list(dict.fromkeys(values))
    return None if None in listed else "+".join(str(each) for each in listed)
