"""Sends recommendations to the server: the result of `timeouts`, queue by queue, through the admin port.

Strategy: one plan per queue, with the lease for each message type. A queue whose clients extend leases gets the first
lease of a plan with renewals. A queue whose clients never extend gets the plain timeout, because nothing else holds
their messages. The floor keeps other clients' heartbeats alive: twice the longest interval between two extends that any
client of the queue was seen to make. The queue's owner decides what the server does with a plan (`adaptive`).
"""

import http.client
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from veilmq.pipeline.errors import SourceRefused, SourceUnreachable, TokenRefused
from veilmq.pipeline.events.reading import (
    GRANT_MEND,
    TOKEN_MEND,
    authorization,
    connection_to,
    message_of,
    no_url,
    path_below,
)
from veilmq.pipeline.jobs.attempts import KEYS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LEASE_US_MAX: Final = 7 * 86_400_000_000
SIGNS: Final = ("received", "extended", "lease_resumed")
"""Events that show that a lease's holder is alive."""
TAKEN: Final = ("applied", "suggested")
"""What a server says of a plan that it took."""
OFF: Final = "adaptive = off: its owner wants no plans"
"""What is said of a queue whose `adaptive` is `off`."""
_SECOND_US: Final = 1_000_000
_TIMEOUT_S: Final = 30.0
_TYPES_MAX: Final = 1_000
_ACTION: Final = "change-queue"
"""What a key must be granted on a queue to send it a plan, or to take one back."""

Queue = tuple[str, str, str]
"""Account, region, name."""


def floors(events: "DataFrame", earlier: "DataFrame | None" = None) -> "DataFrame":
    """By account, region, queue: floor_us, twice the longest interval between two signs of life of a lease's holder.

    earlier: of `attempts.partials`, the leases that ran on when these events began; None: these are all events."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    signs = events.where(f.col("kind").isin(*SIGNS)).select(*KEYS, "offset", "kind", "at")
    if earlier is not None:
        at, before = f.greatest("granted", "last_extension"), f.lit(-1).cast("long")
        last = earlier.select(*KEYS, before.alias("offset"), f.lit(SIGNS[0]).alias("kind"), at.alias("at"))
        signs = last.unionByName(signs)
    lease = Window.partitionBy(*KEYS).orderBy("offset")
    gaps = signs.withColumn("gap_us", f.col("at") - f.lag("at").over(lease)).where(f.col("kind") == "extended")
    return gaps.groupBy("account", "region", "queue").agg((f.max("gap_us") * 2).cast("bigint").alias("floor_us"))


def plans_of(rows: Iterable[Mapping[str, Any]], floors_us: Mapping[Queue, int]) -> dict[Queue, dict[str, Any]]:
    """The plans in the admin port's format, from rows of `timeouts` as dictionaries, of Spark or of pandas.

    floors_us: the minimum of any lease, by queue. A queue with too few observations gets no plan.
    """
    plans: dict[Queue, dict[str, Any]] = {}
    for given in rows:
        row = {name: _known(value) for name, value in given.items()}
        name = "first_lease" if row["today_renewed"] else "timeout"
        seconds = row[f"{name}_s"]
        if not seconds and row["timeout_at_least_s"]:
            # "At least" is no reason to shorten today's lease.
            seconds = max(row["timeout_at_least_s"], row["today_lease_s"])
        if not seconds:
            continue
        queue = (row["account"], row["region"], row["queue"])
        floor_us = min(floors_us.get(queue, 0), LEASE_US_MAX)
        plan = plans.setdefault(queue, {"lease_us": None, "by_type": {}, "floor_us": floor_us, "why": ""})
        lease_us = min(max(int(seconds * _SECOND_US), _SECOND_US), LEASE_US_MAX)
        if row["type"] is None:
            plan["lease_us"] = lease_us
        elif len(plan["by_type"]) < _TYPES_MAX:
            plan["by_type"][row["type"]] = lease_us
        known = f"{row['type'] or 'all messages'}: {row['attempts']:.0f} attempts"
        low_s, high_s = (row.get(f"{name}_{end}_s") for end in ("low", "high"))
        if low_s is not None:
            known += f", 95 % sure: {_seconds(low_s)} {'or more' if high_s is None else f'to {_seconds(high_s)}'}"
        plan["why"] = f"{plan['why']}; {known}".strip("; ")[:1_000]
    return plans


def _seconds(value: float) -> str:
    return f"{float(f'{value:.3g}'):g} s"


def _known(value: Any) -> Any:
    """The value; pandas' NaN becomes None."""
    return None if value is None or value != value else value


def check_rights(server: str, token: str | None, certificate: str | None = None) -> None:
    """Ask the server, before a job runs, whether it would take plans at all; of which queues is not known yet.

    Raises as `publish`, and SourceRefused if the key may change no queue.
    """
    with _asking(server, token, certificate) as ask:
        status, body = ask("GET", "/accounts", None)
    if status != 200:
        if message_of(body) is None:
            raise _no_port(server, status)
        return  # a key that may not ask, or a server that knows no such question, is answered with each plan
    try:
        keys = [key for account in json.loads(body)["accounts"] for key in account["keys"]]
        granted = {key["id"]: any(_ACTION in each["actions"] for each in key["grants"]) for key in keys}
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _no_port(server, status) from None
    # The bearer token has no colon, and may do everything.
    if token is not None and ":" in token and not granted.get(token.partition(":")[0], True):
        raise SourceRefused(f"{server} takes no plan: the key was not granted {_ACTION} on any queue.", GRANT_MEND)


def publish(
    plans: Mapping[Queue, Mapping[str, Any]], server: str, token: str | None, certificate: str | None = None
) -> dict[Queue, str]:
    """Send the plans. Returns the server's answer for each queue: `suggested`, `applied`, `OFF`, or why not.

    certificate: a PEM file to trust, for https. Raises SourceUnreachable, TokenRefused, OptionInvalid.
    """
    return _ask({queue: ("PUT", "/plan", plan) for queue, plan in plans.items()}, server, token, certificate)


def take_back(
    made: Mapping[Queue, tuple[int, str]], server: str, token: str | None, certificate: str | None = None
) -> dict[Queue, str]:
    """Take back the plans made at these instants, each with its reason, unless another is in force by now. Returns
    `taken back` or why not, by queue. Raises as `publish`."""
    calls = {queue: ("POST", "/plan/revert", {"made": at, "why": why[:1_000]}) for queue, (at, why) in made.items()}
    verdicts = _ask(calls, server, token, certificate)
    return {queue: "taken back" if each in TAKEN else each for queue, each in verdicts.items()}


def _ask(
    calls: Mapping[Queue, tuple[str, str, Mapping[str, Any]]], server: str, token: str | None, certificate: str | None
) -> dict[Queue, str]:
    verdicts: dict[Queue, str] = {}
    with _asking(server, token, certificate) as ask:
        for queue, (method, suffix, members) in calls.items():
            path = "/queues/" + "/".join(quote(part, safe="") for part in queue) + suffix
            verdicts[queue] = _verdict(server, *ask(method, path, members))
    return verdicts


@contextmanager
def _asking(server: str, token: str | None, certificate: str | None) -> Iterator[Callable[..., tuple[int, bytes]]]:
    """Yields a function of method, path below /api/v1, and members: status and body of the answer. Raises
    TokenRefused, SourceUnreachable, OptionInvalid."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": authorization(token)} if token else {})
    connection, below = connection_to(server, certificate, _TIMEOUT_S), path_below(server)

    def ask(method: str, path: str, members: Mapping[str, Any] | None) -> tuple[int, bytes]:
        content = None if members is None else json.dumps(members).encode()
        connection.request(method, f"{below}/api/v1{path}", content, headers)
        with connection.getresponse() as answer:
            status, body = answer.status, answer.read()
        if status == 401:
            raise TokenRefused(f"{server} refuses: {message_of(body) or status}.", TOKEN_MEND)
        return status, body

    try:
        yield ask
    except UnicodeError:
        raise no_url(server) from None
    except (OSError, http.client.HTTPException) as error:
        raise SourceUnreachable(f"{server} cannot be told: {error}.", "Is its admin port there?") from None
    finally:
        connection.close()


def _verdict(server: str, status: int, body: bytes) -> str:
    """The verdict in one answer. Raises SourceUnreachable if no admin port answered."""
    message = message_of(body)
    if status == 501 and message is not None:
        return OFF
    if status != 200 and message is not None:
        return message
    try:
        if status == 200:
            return "applied" if json.loads(body)["plan"]["applied"] is not None else "suggested"
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    raise _no_port(server, status)


def _no_port(server: str, status: int) -> SourceUnreachable:
    return SourceUnreachable(f"{server} is no VeilMQ admin port: it answers {status}.", "Is the URL right?")
