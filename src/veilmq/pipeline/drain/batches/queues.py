"""Many queues as the one that a drain receives from: those of the option `queues`, names or patterns (`orders-*`).

Strategy: without Spark. The object provides what a drain calls on a queue. A handle and an id begin with the name of
their queue, so that leases and deletes find their way, also those of a batch that an earlier process received, and so
that equal ids of two queues are two messages.

Which queue is received from: a batch is shared out by `plan` before its first receive, by the depths that the queues
report. Half of it goes to all queues evenly, the other half in proportion to depth, and what a queue cannot use goes to
the others. So a small queue is emptied by each batch however deep its neighbours are, and a deep one is not held up by
many small ones. If there are more queues than messages in a batch, they take turns.

Depths are approximate on some services. So each batch also asks a few of the queues that report nothing.

The queues are listed again every `refresh` seconds. A queue that is gone is left out from then on, and taken up again
if it comes back; its messages are gone with it, and the others go on.
"""

import fnmatch
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar, cast

import msgspec

from veilmq.client.adapters.connect import connect, connect_account
from veilmq.client.clock import Clock
from veilmq.client.messages import Extension, Received, Stats
from veilmq.client.queue import Account, Capabilities, Queue, identity_of
from veilmq.client.routed import weakest
from veilmq.model.errors import InFlightFull, ParameterInvalid, QueueMissing, ReceiptInvalid, VeilError
from veilmq.pipeline.errors import OptionInvalid, SourceUnreachable, unusable
from veilmq.pipeline.options import DrainOptions

T = TypeVar("T")
R = TypeVar("R")

_SEPARATOR: Final = ":"
"""No service allows it in a queue's name."""
_WILD: Final = "*?["
_PROBED: Final = 2
"""Queues per batch that are asked although they report no messages."""
_LOOK_SECONDS: Final = 0.005
"""An idle stream asks for depths at most once in this time for each queue."""
NAME: Final = "many queues"
"""No queue has a name with a space."""

log = logging.getLogger("veilmq.pipeline")


def shares(depths: Mapping[str, int], wanted: int) -> dict[str, int]:
    """How many of `wanted` messages each queue gives, by its depth; queues that come first win the last ones."""
    there = {name: depth for name, depth in depths.items() if depth > 0}
    if sum(there.values()) <= wanted:
        return there
    given = _evenly(there, (wanted + 1) // 2)
    left = {name: depth - given[name] for name, depth in there.items()}
    rest, total = wanted - sum(given.values()), sum(left.values())
    for name, depth in left.items():
        more = rest * depth // total
        given[name] += more
        left[name] -= more
    for name in sorted(left, key=lambda each: -left[each])[: wanted - sum(given.values())]:
        given[name] += min(1, left[name])
    return {name: count for name, count in given.items() if count}


def _evenly(depths: Mapping[str, int], wanted: int) -> dict[str, int]:
    """The same for each, as far as it has so many. Fewer messages than queues: one for each of the first."""
    given = dict.fromkeys(depths, 0)
    rest = wanted
    if wanted < len(depths):
        return given | dict.fromkeys(list(depths)[:wanted], 1)
    for place, name in enumerate(sorted(depths, key=lambda each: depths[each])):
        given[name] = min(depths[name], -(-rest // (len(depths) - place)))
        rest -= given[name]
    return given


class Queues:
    """The queues of one account that match `patterns`. Thread-safe. Raises what the account's calls raise."""

    def __init__(
        self, account: Account, patterns: Sequence[str], *, refresh: float, is_loss_fatal: bool, lookers: int,
        clock: Clock,
    ) -> None:  # fmt: skip
        """refresh: seconds. is_loss_fatal: SourceUnreachable when a queue is gone. lookers: depths asked at a time."""
        self._account, self._patterns = account, tuple(patterns)
        self._refresh, self._is_loss_fatal, self._clock = refresh, is_loss_fatal, clock
        self._pool = ThreadPoolExecutor(lookers, "veilmq drain depths")
        self._lock = threading.Lock()
        self._open: dict[str, Queue] = {}
        self._stats: dict[str, Stats] = {}
        self._depths: dict[str, int] = {}
        self._absent: set[str] = set()
        self._shares: dict[str, int] = {}
        self._targets: dict[str, int] | None = None
        self._turn = itertools.count()
        self._listed_at = self._looked_at = float("-inf")
        self.names: tuple[str, ...] = ()
        """Those that are there."""
        self.look()

    @property
    def name(self) -> str:
        """The same for all lists, so that a query may change its own."""
        return NAME

    @property
    def capabilities(self) -> Capabilities:
        """What all of them can do; a FIFO queue if one of them is."""
        all_of = [self._account.capabilities(name) for name in self.names or ("queue",)]
        return msgspec.structs.replace(weakest(all_of), native_fifo=any(each.native_fifo for each in all_of))

    def look(self) -> None:
        """Find out which queues there are now."""
        found: set[str] = set()
        for pattern in self._patterns:
            fixed = pattern[: min((pattern.find(sign) for sign in _WILD if sign in pattern), default=len(pattern))]
            if fixed == pattern:
                found.add(pattern)
            else:
                found |= {each for each in self._account.names(fixed) if fnmatch.fnmatchcase(each, pattern)}
        before, self.names = self.names, tuple(sorted(found))
        self._listed_at = self._clock.monotonic()
        for name in sorted(set(before) - found):
            self._lose(name)
        if new := sorted(found - set(before)):
            log.info("queues taken up: %s", ", ".join(new))

    def prepare(self) -> Stats:
        """Messages that arrive from now on, and queues that appear, are left to the next run."""
        self.look()
        stats = self.stats()
        with self._lock:
            self._targets = {name: total(each) for name, each in self._stats.items()}
        return stats

    def plan(self, wanted: int) -> None:
        """Share a batch of `wanted` messages out."""
        now = self._clock.monotonic()
        if now - self._listed_at >= self._refresh and self._targets is None:
            self.look()
        if now - self._looked_at >= _LOOK_SECONDS * len(self.names):
            self.stats()
        with self._lock:
            first = next(self._turn) % max(1, len(self.names))
            turn = [name for name in self.names[first:] + self.names[:first] if name in self._depths]
            depths = {name: self._bounded(name, self._depths[name]) for name in turn}
            self._shares = shares(depths, wanted)
            silent = [name for name in turn if not depths[name] and self._bounded(name, wanted)]
            self._shares |= {name: self._bounded(name, wanted) for name in silent[:_PROBED]}

    def emitted(self, messages: Sequence[Received]) -> None:
        """They are in a batch, and count against what this run may receive."""
        with self._lock:
            if self._targets is not None:
                for each in messages:
                    name = each.id.partition(_SEPARATOR)[0]
                    self._targets[name] = self._targets.get(name, 0) - 1

    def receive(self, count_max: int, *, lease: float, wait: float = 0) -> list[Received]:
        """Up to so many messages of one queue, of those that have a share left. `wait`: a pause before a new plan."""
        if wait:
            time.sleep(wait)
            self.plan(count_max)
        while True:
            with self._lock:
                if not self._shares:
                    return []
                name = max(self._shares, key=self._shares.__getitem__)
                count = min(count_max, self._shares[name])
                if self._shares[name] > count:
                    self._shares[name] -= count
                else:
                    del self._shares[name]
            came = self._received(name, count, lease)
            if came:
                return came

    def extend_batch(self, extensions: Sequence[Extension]) -> list[str | VeilError]:
        """As a queue's."""

        def extend(name: str, group: list[Extension]) -> list[str | VeilError]:
            bare = [Extension(each.handle.partition(_SEPARATOR)[2], each.lease) for each in group]
            answers = self._queue(name).extend_batch(bare)
            return [joined(name, each) if isinstance(each, str) else each for each in answers]

        return self._grouped([(each.handle, each) for each in extensions], extend)

    def extend(self, handle: str, lease: float) -> str:
        """As a queue's."""
        (answer,) = self.extend_batch([Extension(handle, lease)])
        if isinstance(answer, VeilError):
            raise answer
        return answer

    def release(self, handle: str, delay: float = 0) -> None:
        """As a queue's."""
        name, _, bare = handle.partition(_SEPARATOR)
        try:
            self._queue(name).release(bare, delay)
        except QueueMissing as error:
            raise _gone(error) from None

    def delete_batch(self, handles: Sequence[str]) -> list[VeilError | None]:
        """As a queue's."""

        def delete(name: str, group: list[str]) -> list[VeilError | None]:
            return self._queue(name).delete_batch([each.partition(_SEPARATOR)[2] for each in group])

        return self._grouped([(each, each) for each in handles], delete)

    def takes(self, queue: Queue) -> bool:
        """Whether `queue`, which is there, is one of them, now or as soon as they are listed again."""
        if not any(fnmatch.fnmatchcase(queue.name, pattern) for pattern in self._patterns):
            return False
        try:
            return identity_of(self._queue(queue.name)) == identity_of(queue)
        except QueueMissing:  # it is elsewhere
            return False

    def stats(self) -> Stats:
        """The sums."""

        def asked(name: str) -> tuple[str, Stats | None]:
            try:
                return name, self._queue(name).stats()
            except QueueMissing:
                return name, None

        found = list(self._pool.map(asked, self.names))
        for name, answer in found:
            if answer is None:
                self._lose(name)
        all_of = {name: answer for name, answer in found if answer is not None}
        with self._lock:
            self._stats, self._looked_at = all_of, self._clock.monotonic()
            self._depths = {name: each.visible for name, each in all_of.items()}
            self._absent -= all_of.keys()
        return self.known()

    def known(self) -> Stats:
        """The sums as they were last asked for, less what was received since. No I/O."""
        with self._lock:
            all_of, visible = dict(self._stats), sum(self._depths.values())
        return Stats(
            visible=visible,
            delayed=sum(each.delayed or 0 for each in all_of.values()),
            in_flight=sum(each.in_flight or 0 for each in all_of.values()),
            retention=max((each.retention or 0 for each in all_of.values()), default=0) or None,
        )

    def close(self) -> None:
        """Close the account with all its queues."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._account.close()

    def _bounded(self, name: str, count: int) -> int:
        """With the lock held: no more than this run may still receive."""
        return count if self._targets is None else max(0, min(count, self._targets.get(name, 0)))

    def _queue(self, name: str) -> Queue:
        with self._lock:
            found = self._open.get(name)
        if found is None:
            found = self._account.queue(name)
            with self._lock:
                found = self._open.setdefault(name, found)
        return found

    def _received(self, name: str, count: int, lease: float) -> list[Received]:
        try:
            queue = self._queue(name)
            came = queue.receive(min(count, queue.capabilities.receive_messages_max), lease=lease)
        except QueueMissing:
            self._lose(name)
            return []
        except InFlightFull as error:
            log.info("nothing comes of %s until others are done: %s", name, error)
            return []
        with self._lock:
            self._depths[name] = max(0, self._depths.get(name, 0) - len(came)) if came else 0
            if not came:
                self._shares.pop(name, None)
        return [
            msgspec.structs.replace(each, id=joined(name, each.id), handle=joined(name, each.handle)) for each in came
        ]

    def _lose(self, name: str) -> None:
        """The queue is gone, with its messages."""
        with self._lock:
            is_new = name not in self._absent
            self._absent.add(name)
            for each in (self._open, self._shares, self._stats, self._depths):
                each.pop(name, None)
        if self._is_loss_fatal:
            raise SourceUnreachable(
                f"There is no queue {name}, and failOnDataLoss is on.",
                "Create it, or leave it out of the option queues.",
            )
        if is_new:
            log.warning("there is no queue %s (any more): the other queues go on", name)

    def _grouped(
        self, entries: Sequence[tuple[str, T]], call: Callable[[str, list[T]], Sequence[R]]
    ) -> list[R | VeilError]:
        """Call `call` once for each queue with its entries, which are given by handle; the results in their order."""
        groups: dict[str, list[int]] = {}
        for place, (handle, _) in enumerate(entries):
            groups.setdefault(handle.partition(_SEPARATOR)[0], []).append(place)
        results: dict[int, R | VeilError] = {}
        for name, places in groups.items():
            answers: Sequence[R | VeilError]
            try:
                answers = call(name, [entries[place][1] for place in places])
            except QueueMissing as error:
                answers = [_gone(error)] * len(places)
            except VeilError as error:
                if len(groups) == 1:
                    raise
                answers = [error] * len(places)
            results |= dict(zip(places, answers, strict=True))
        return [results[place] for place in range(len(entries))]


def _gone(error: QueueMissing) -> ReceiptInvalid:
    return ReceiptInvalid(reason=f"queue {error.queue} is gone")


def joined(name: str, text: str) -> str:
    """An id or a handle, with its queue's name before it."""
    return f"{name}{_SEPARATOR}{text}"


def parted(text: str) -> tuple[str, str]:
    """The reverse of `joined`."""
    name, _, bare = text.partition(_SEPARATOR)
    return name, bare


def opened(options: DrainOptions, clock: Clock) -> Queue:
    """The queue, or the queues, that a drain receives from. Raises OptionInvalid, SourceUnreachable."""
    try:
        if not options.queues:
            return connect(options.url)
        account = connect_account(options.url)
    except ParameterInvalid as error:
        shape = (
            "veil://127.0.0.1:9324/ (with the option queues, without a name)"
            if options.queues
            else "veil://127.0.0.1:9324/orders"
        )
        raise OptionInvalid(f"The option url cannot be: {error}.", f"It looks like {shape}.") from None
    except VeilError as error:
        raise SourceUnreachable(*unusable("The queue of the option url", error)) from None
    try:
        many = Queues(
            account, options.queues, refresh=options.refresh, is_loss_fatal=bool(options.fail_on_data_loss),
            lookers=options.receivers, clock=clock,
        )  # fmt: skip
    except BaseException as error:
        account.close()
        if isinstance(error, VeilError):
            raise SourceUnreachable(f"The queues cannot be listed: {error}.", "Is the server there?") from None
        raise
    return cast(Queue, many)


def is_drained(queue: Queue, source: Queue) -> bool:
    """Whether a drain of `source`, a queue or `Queues`, receives from `queue`. Raises VeilError."""
    several: object = source
    return several.takes(queue) if isinstance(several, Queues) else identity_of(source) == identity_of(queue)


def total(stats: Stats) -> int:
    """Messages in any state."""
    return stats.visible + (stats.delayed or 0) + (stats.in_flight or 0)
