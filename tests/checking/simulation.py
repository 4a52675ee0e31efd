"""Generated histories: a tiny queue under a virtual clock, clients whose calls overlap, and answers that get lost.

Strategy: a call begins, happens and is answered at three different instants, and calls of several clients overlap. What
an unanswered call did happens on time, late or never. `bugs` names single rules that the queue then breaks. Everything
depends only on the seed. Times are microseconds.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from msgspec.structs import replace

from veilmq.checking.log import Grant, Kind, Operation, Outcome
from veilmq.checking.report import Promises
from veilmq.testing import chance

WINDOW_US = 900
COUNT_MAX = 3
DEAD = "dead"


@dataclass
class Held:
    """A message of the queue."""

    id: str
    queue: str
    body: str
    group: str | None
    deduplication: str | None
    sequence: int | None
    visible: int
    expires: int
    count: int = 0
    lease: int = -1
    rotation: int = 0
    together: int = -1
    """The receive that granted it last."""


@dataclass
class Server:
    """The queue. It carries out one call after the other."""

    random: Any
    fifo: bool
    quiet: bool
    bugs: frozenset[str]
    held: dict[str, Held] = field(default_factory=dict)
    gone: list[Held] = field(default_factory=list)
    by_lease: dict[int, Held] = field(default_factory=dict)
    accepted: dict[str, tuple[int, Held]] = field(default_factory=dict)
    numbers: Any = field(default_factory=lambda: count(1))
    leases: Any = field(default_factory=lambda: count(1))

    def bug(self, name: str, share: float = 0.3) -> bool:
        return name in self.bugs and self.random.random() < share

    def send(self, now: int, asked: Operation) -> dict[str, Any]:
        window = WINDOW_US * 2 if "window too long" in self.bugs else WINDOW_US
        if "window too short" in self.bugs:
            window = WINDOW_US // 3
        if asked.deduplication is not None and not self.bug("duplicate taken"):
            at, first = self.accepted.get(asked.deduplication, (0, None))
            if first is not None and now < at + window:
                return {"message": first.id, "sequence": first.sequence}
        number = next(self.numbers)
        sequence = (number if not self.bug("sequence falls", 0.1) else number - 5) if self.fifo else None
        delay = 0 if self.bug("delay ignored") else asked.delay_us
        expires = now + asked.ttl_us if asked.ttl_us is not None else 2**60
        body = asked.body if not self.bug("body stored wrong", 0.05) else "damaged"
        held = Held(f"m{number}", asked.queue, body, asked.group, asked.deduplication, sequence, now + delay, expires)
        if self.bug("same id twice", 0.1) and self.held:
            return {"message": next(iter(self.held)), "sequence": sequence}
        if not self.bug("send not stored", 0.05):
            self.held[held.id] = held
        if self.bug("sent twice", 0.05):
            self.held[f"{held.id}b"] = Held(**{**vars(held), "id": f"{held.id}b"})
        if asked.deduplication is not None:
            self.accepted[asked.deduplication] = (now, held)
        return {"message": held.id, "sequence": sequence}

    def _visible(self, now: int, queue: str) -> list[Held]:
        for held in list(self.held.values()):
            if held.expires <= now and "expiry ignored" not in self.bugs:
                self._forget(held)
        here = [each for each in self.held.values() if each.queue == queue]
        if not self.fifo:
            self.random.shuffle(here)
            shown = (each.lease >= 0 and self.bug("lease ignored", 0.1) for each in here)
            return [each for each, early in zip(here, shown, strict=True) if each.visible <= now or early]
        found: list[Held] = []
        groups: dict[str | None, bool] = {}
        here.sort(key=lambda each: each.sequence or 0)
        if self.bug("group swapped", 0.1):
            here.reverse()
        for each in here:
            blocked = groups.get(each.group, False) and not self.bug("group not locked", 0.2)
            if each.visible <= now and not blocked:
                found.append(each)
            else:
                groups[each.group] = True
        return found

    def receive(self, now: int, asked: Operation, most: int) -> tuple[Grant, ...]:
        grants: list[Grant] = []
        for held in self._visible(now, asked.queue):
            if len(grants) == most:
                break
            if held.queue != DEAD and held.count >= COUNT_MAX and not self.fifo:
                held.queue = DEAD
                held.lease = -1
                if self.bug("dead letter lost"):
                    self._forget(held)
                if self.bug("dead letter elsewhere"):
                    held.queue = "other"
                continue
            grants.append(self._grant(now, held, asked))
        if self.bug("resurrects", 0.1) and self.gone and most > len(grants):
            held = self.gone.pop()
            self.held[held.id] = held
            grants.append(self._grant(now, held, asked))
        if self.bug("invents", 0.05) and most > len(grants):
            number = next(self.leases)
            grants.append(Grant(message=f"x{number}", lease=number, lease_us=asked.lease_us, body="x", count=1))
        return tuple(grants)

    def _grant(self, now: int, held: Held, asked: Operation) -> Grant:
        if not self.bug("count stays", 0.2):
            held.count += 1
        if self.bug("count restarts", 0.1):
            held.count = 1
        held.lease, held.rotation = next(self.leases), 0
        held.visible = now + (asked.lease_us // 8 if "lease too short" in self.bugs else asked.lease_us)
        self.by_lease[held.lease] = held
        body = held.body if not self.bug("body cut", 0.05) else held.body[:1]
        group = held.group if not self.bug("group changed", 0.05) else "z"
        sequence = held.sequence if not self.bug("sequence changes", 0.1) else next(self.numbers)
        return Grant(
            message=held.id, lease=held.lease, lease_us=asked.lease_us, body=body, count=held.count, group=group,
            deduplication=held.deduplication, sequence=sequence,
        )  # fmt: skip

    def use(self, now: int, asked: Operation) -> dict[str, Any] | None:
        """None: refused."""
        assert asked.lease is not None
        held = self.by_lease[asked.lease]
        silent = {} if self.quiet and asked.kind is Kind.DELETE else None
        if held.id not in self.held:
            return {} if "use of the deleted" in self.bugs and held in self.gone else silent
        stale = held.lease != asked.lease and f"stale {asked.kind}" not in self.bugs
        void = held.rotation != asked.rotation and held.lease == asked.lease and "old rotation" not in self.bugs
        if stale or void or (self.fifo and held.visible <= now):
            return silent
        if asked.kind is Kind.DELETE:
            if not self.bug("delete ignored"):
                self._forget(held)
                self.gone.append(held)
            return {}
        held.rotation += asked.rotates
        if asked.kind is Kind.EXTEND:
            if asked.body:
                held.body = asked.body
            if self.bug("extend ignored", 0.5):
                return {}
        held.visible = now + asked.lease_us
        if asked.kind is Kind.RELEASE and "release too early" in self.bugs:
            held.visible = now
        return {}

    def purge(self) -> None:
        self.accepted.clear()
        if "purge ignored" not in self.bugs:
            for held in list(self.held.values()):
                if held.queue != DEAD:
                    self._forget(held)

    def restart(self) -> None:
        """A bug: the store forgets what was committed last."""
        for held in list(self.held.values())[-3:]:
            self._forget(held)

    def _forget(self, held: Held) -> None:
        self.held.pop(held.id, None)


class Simulation:
    """`Simulation(seed).log` is the history."""

    def __init__(
        self,
        seed: int,
        *,
        fifo: bool = False,
        rotates: bool = False,
        quiet: bool = False,
        clients: int = 4,
        calls: int = 120,
        unknown: float = 0.1,
        bugs: frozenset[str] = frozenset(),
    ) -> None:
        self.random = chance(seed)
        self.fifo, self.rotates, self.unknown = fifo, rotates, unknown
        self.queue = "jobs.fifo" if fifo else "jobs"
        self.server = Server(self.random, fifo, quiet, bugs)
        self.promises = Promises(
            stale_deletes_refused=not quiet, deduplication_us=WINDOW_US, tolerance_us=0,
            dead_letters={} if fifo else {"jobs": DEAD},
        )  # fmt: skip
        self.log: list[Operation] = []
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._order = count()
        self._bodies = count()
        self._known: list[list[Any]] = []
        """[lease, rotation] of handles that some client holds."""
        self._left = calls
        for client in range(clients):
            self._at(self.random.randint(0, 20), lambda now, client=client: self._call(client, now))  # type: ignore[misc]
        if "restart loses" in bugs:
            self._at(600, lambda now: self.server.restart())
        end = self._run()
        self._drain(end + 10_000)

    def _at(self, time: int, call: Callable[[int], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), call))

    def _run(self) -> int:
        now = 0
        while self._events:
            now, _, call = heapq.heappop(self._events)
            call(now)
        return now

    def _call(self, client: int, now: int) -> None:
        """Begin a call; its end begins the client's next."""
        if self._left <= 0:
            return
        self._left -= 1
        asked = self._asked(client, now)
        place = len(self.log)
        self.log.append(asked)
        slow = self.random.random() < 0.15
        served = now + self.random.randint(1, 200 if slow else 15)
        returned = served + self.random.randint(1, 200 if slow else 15)
        if self.random.random() < self.unknown:
            served += self.random.choice((0, 0, 300))
            if self.random.random() < 0.7:
                self._at(served, lambda now: self._serve(asked, now))
            self.log[place] = replace(asked, returned=self.random.choice((None, returned)), why="timed out")
        else:
            answers: list[Operation] = []
            self._at(served, lambda now: answers.append(self._serve(asked, now)))
            self._at(returned, lambda now: self._answered(place, answers[0], now))
        self._at(returned + self.random.randint(1, 20), lambda now: self._call(client, now))

    def _asked(self, client: int, now: int) -> Operation:
        def operation(kind: Kind, **fields: Any) -> Operation:
            given = {"queue": self.queue, **fields}
            return Operation(number=len(self.log), client=f"c{client}", kind=kind, invoked=now, **given)

        draw = self.random.random()
        if draw < 0.3 or (draw >= 0.6 and not self._known):
            body = f"body {next(self._bodies)}" if self.random.random() < 0.9 else "same body"
            if self.fifo:
                name = f"d{self.random.randint(0, 8)}" if self.random.random() < 0.4 else body + str(next(self._bodies))
                return operation(Kind.SEND, body=body, group=self.random.choice("ab"), deduplication=name)
            delay = self.random.choice((0, 0, 0, 100))
            ttl = self.random.choice((None, None, None, 500))
            return operation(Kind.SEND, body=body, delay_us=delay, ttl_us=ttl)
        if draw < 0.6:
            queue = self.queue if self.fifo or self.random.random() < 0.85 else DEAD
            return operation(Kind.RECEIVE, lease_us=self.random.choice((0, 30, 100, 400)), queue=queue)
        if draw > 0.995:
            return operation(Kind.PURGE)
        lease, rotation = self.random.choice(self._known[-12:])
        if draw < 0.8:
            return operation(Kind.DELETE, lease=lease, rotation=rotation)
        if draw < 0.9:
            return operation(
                Kind.RELEASE, lease=lease, rotation=rotation, lease_us=self.random.choice((0, 0, 60)),
                rotates=self.rotates,
            )  # fmt: skip
        body = f"body {next(self._bodies)}" if self.rotates and self.random.random() < 0.3 else ""
        lease_us = self.random.choice((20, 100, 400))
        return operation(
            Kind.EXTEND, lease=lease, rotation=rotation, lease_us=lease_us, body=body, rotates=self.rotates
        )

    def _serve(self, asked: Operation, now: int) -> Operation:
        outcome = Outcome.OK
        done: dict[str, Any] | None = {}
        match asked.kind:
            case Kind.SEND:
                done = self.server.send(now, asked)
            case Kind.RECEIVE:
                done = {"grants": self.server.receive(now, asked, self.random.randint(1, 4))}
            case Kind.PURGE:
                self.server.purge()
            case _:
                done = self.server.use(now, asked)
        if done is None:
            outcome, done = Outcome.FAIL, {}
        return replace(asked, outcome=outcome, **done)

    def _answered(self, place: int, answer: Operation, now: int) -> None:
        self.log[place] = replace(answer, returned=now)
        self._known += [[each.lease, 0] for each in answer.grants if each.lease in self.server.by_lease]
        if answer.kind is Kind.EXTEND and answer.rotates and answer.outcome is Outcome.OK:
            self._known.append([answer.lease, answer.rotation + 1])

    def _drain(self, now: int) -> None:
        for queue in (self.queue, DEAD):
            begin = now
            while True:
                asked = Operation(
                    number=len(self.log), client="drain", kind=Kind.RECEIVE, queue=queue, invoked=now, lease_us=10**9
                )
                grants = self.server.receive(now + 1, asked, 10)
                self.log.append(replace(asked, returned=now + 2, outcome=Outcome.OK, grants=grants))
                now += 3
                for grant in grants if self.fifo else ():  # what is behind them comes only when they are gone
                    asked = Operation(
                        number=len(self.log), client="drain", kind=Kind.DELETE, queue=queue, invoked=now,
                        lease=grant.lease,
                    )  # fmt: skip
                    if grant.lease in self.server.by_lease:
                        self.log.append(replace(self._serve(asked, now + 1), returned=now + 2))
                    now += 3
                if not grants or now > begin + 3_000:
                    break
            self.log.append(
                Operation(
                    number=len(self.log),
                    client="drain",
                    kind=Kind.DRAIN,
                    queue=queue,
                    invoked=begin,
                    returned=now,
                    outcome=Outcome.OK,
                )
            )
            now += 1
