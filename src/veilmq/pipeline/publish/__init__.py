"""Sends plans to the server, queue by queue, through the admin port, and takes them back.

The queue's owner decides what the server does with a plan (`adaptive`).
"""

import http.client
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
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
from veilmq.pipeline.publish.plans import Queue

TAKEN: Final = ("applied", "suggested")
"""What a server says of a plan that it took."""
OFF: Final = "adaptive = off: its owner wants no plans"
"""What is said of a queue whose `adaptive` is `off`."""
_TIMEOUT_S: Final = 30.0
_ACTION: Final = "change-queue"
"""What a key must be granted on a queue to send it a plan, or to take one back."""


def check_rights(server: str, token: str | None, certificate: str | None = None) -> None:
    """Ask the server, before a job runs, whether it would take plans at all; of which queues is not known yet.

    Any other answer, such as a proxy's that passes on nothing but plans, is left to `publish`. Raises as `publish`, and
    SourceRefused if the key may change no queue.
    """
    # The bearer token has no colon, and may do everything.
    key_id, is_key, _ = (token or "").partition(":")
    with _asking(server, token, certificate) as ask:
        status, body = ask("GET", "/accounts" if is_key else "/accounts?limit=1", None)
    if status != 200 or not is_key:
        return
    try:
        keys = [key for account in json.loads(body)["accounts"] for key in account["keys"]]
        granted = {key["id"]: any(_ACTION in each["actions"] for each in key["grants"]) for key in keys}
    except (ValueError, LookupError, TypeError, RecursionError):
        return
    if not granted.get(key_id, True):
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
        raise SourceUnreachable(f"{server} cannot be reached: {error}.", "Is its admin port there?") from None
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
    raise SourceUnreachable(f"{server} is no VeilMQ admin port: it answers {status}.", "Is the URL right?")
