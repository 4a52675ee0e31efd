"""Admin access through a server's admin port: the path, members and time of each call."""

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

from veilmq.admin.api import described, inputs
from veilmq.admin.api.operations import OPERATIONS
from veilmq.cli.access import EVERYTHING, Home, Piece, failure_of, several_accounts
from veilmq.cli.access.client import ANSWER_S, WORK_S, AdminClient
from veilmq.cli.failures import Missing, Unknown
from veilmq.cli.options import refused_value
from veilmq.model.errors import ParameterInvalid
from veilmq.model.settings.access import DEVELOPMENT_ACCOUNT, HOME_REGION_DEFAULT
from veilmq.model.settings.queue import QueueKey

_WORKERS_MAX: Final = 10_000
_MUCH_WORK: Final = frozenset({"purge", "remove", "move"})


class HttpAccess(AdminClient):
    """`AdminAccess`, which describes each method; `AdminClient` says how it is opened."""

    def run(
        self, operation: str, queue: QueueKey, members: Mapping[str, Any], command_id: str | None = None
    ) -> dict[str, Any]:
        try:
            inputs.queue_key(queue.account, queue.region, queue.name)
        except ParameterInvalid as error:
            answer = described(error)
            raise failure_of(answer["error"], refused_value(answer["field"], answer["message"]), answer) from None
        self._operation, path = operation, f"{_path_of(queue)}{OPERATIONS[operation].suffix}"
        try:
            return self._run(operation, path, members, command_id)
        except Missing as failure:
            if self.home(queue.account).is_known:
                raise
            advice = f"The server's credentials file has no account {queue.account}: is that the one you mean?"
            raise Missing(failure.code, str(failure), advice) from None

    def _run(self, operation: str, path: str, members: Mapping[str, Any], command_id: str | None) -> dict[str, Any]:
        row = OPERATIONS[operation]
        answer_s = WORK_S if operation in _MUCH_WORK else ANSWER_S + (members.get("wait_us") or 0) / 1e6
        if row.method == "GET":
            return self._json("GET", path, members)
        body = json.dumps(dict(members)).encode()
        return self._json(row.method, path, {}, body, answer_s=answer_s, command_id=command_id)

    def home(self, account: str | None) -> Home:
        try:
            own = self._json("GET", "/api/v1/account", {"account": account})
        except Unknown:  # a server of an earlier release
            return Home(account or DEVELOPMENT_ACCOUNT, HOME_REGION_DEFAULT)
        found: str | None = account or own["account"]
        if found is None:
            raise several_accounts("the server has several accounts", own.get("accounts") or ())
        # Earlier releases know no other region, and do not say whether they know the account.
        return Home(found, own.get("region") or HOME_REGION_DEFAULT, own.get("known") is not False)

    def queues(self, account: str, region: str | None, prefix: str, minutes: int = 0) -> Iterator[dict[str, Any]]:
        members = {"account": account, "region": region, "prefix": prefix, "minutes": minutes or None}
        return self._listed("/api/v1/queues", "queues", members)

    def topics(self, account: str, region: str | None, prefix: str) -> Iterator[dict[str, Any]]:
        return self._listed("/api/v1/topics", "topics", {"account": account, "region": region, "prefix": prefix})

    def moves(self, account: str, region: str | None, prefix: str) -> Iterator[dict[str, Any]]:
        return self._listed("/api/v1/moves", "moves", {"account": account, "region": region, "prefix": prefix})

    def jobs(self, account: str, region: str | None, prefix: str) -> Iterator[dict[str, Any]]:
        return self._listed("/api/v1/jobs", "jobs", {"account": account, "region": region, "prefix": prefix})

    def job(self, job: str) -> dict[str, Any]:
        return self._json("GET", f"/api/v1/jobs/{quote(job, safe='')}", {})

    def start_job(self, queue: QueueKey, members: Mapping[str, Any], command_id: str) -> dict[str, Any]:
        key = {"account": queue.account, "region": queue.region, "name": queue.name}
        self._operation, body = "start_job", json.dumps({**members, "queue": key}).encode()
        return self._json("POST", "/api/v1/jobs", {}, body, answer_s=WORK_S, command_id=command_id)

    def cancel_job(self, job: str, command_id: str) -> dict[str, Any]:
        return self._json("POST", f"/api/v1/jobs/{quote(job, safe='')}/cancel", {}, b"{}", command_id=command_id)

    def quarantined(self, account: str, region: str | None, prefix: str, *, bodies: bool) -> Iterator[dict[str, Any]]:
        path = "/api/v1/quarantine/export" if bodies else "/api/v1/quarantine"
        members = {"account": account, "region": region, "prefix": prefix, "limit": inputs.PAGE_MAX}
        return self._listed(path, "messages", members, answer_s=WORK_S)

    def _listed(
        self, path: str, name: str, members: dict[str, Any], *, answer_s: float | None = None
    ) -> Iterator[dict[str, Any]]:
        """The entries of all pages."""
        return (each for page in self._pages(path, members, answer_s=answer_s) for each in page[name])

    def _pages(
        self, path: str, members: Mapping[str, Any], *, answer_s: float | None = None
    ) -> Iterator[dict[str, Any]]:
        """All pages. An earlier release has no more than one page of moves."""
        after: str | None = ""
        while after is not None:
            page = self._json("GET", path, {**members, "after": after}, answer_s=answer_s)
            yield page
            after = page.get("after")

    def messages(self, queue: QueueKey, wanted: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        return self._pages(f"{_path_of(queue)}/messages", wanted, answer_s=WORK_S)

    def holders(self, queue: QueueKey, client: str) -> Iterator[dict[str, Any]]:
        members = {"client": client, "limit": inputs.PAGE_MAX}
        return self._pages(f"{_path_of(queue)}/holders", members, answer_s=WORK_S)

    def blocked(self, queue: QueueKey, limit: int) -> dict[str, Any]:
        return self._json("GET", f"{_path_of(queue)}/blocked", {"limit": limit}, answer_s=WORK_S)

    def rollups(self, queue: QueueKey, wanted: Mapping[str, Any]) -> dict[str, Any]:
        return self._json("GET", f"{_path_of(queue)}/rollups", wanted)

    def past(self, queue: QueueKey, wanted: Mapping[str, Any]) -> dict[str, Any]:
        return self._json("GET", f"{_path_of(queue)}/past", wanted, answer_s=WORK_S)

    def timeout(self, queue: QueueKey, tried_us: int | None) -> dict[str, Any]:
        members = {} if tried_us is None else {"timeout_us": tried_us}
        return self._json("GET", f"{_path_of(queue)}/timeout", members, answer_s=WORK_S)

    def worst(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        return self._json("GET", "/api/v1/worst", wanted, answer_s=WORK_S)

    def wrong_timeouts(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        return self._json("GET", "/api/v1/timeouts", {"look": "true", **wanted}, answer_s=WORK_S)

    def failures(self, queue: QueueKey, minutes: int) -> dict[str, Any]:
        return self._json("GET", f"{_path_of(queue)}/failures", {"minutes": minutes}, answer_s=WORK_S)

    def all_failures(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        return self._json("GET", "/api/v1/failures", wanted, answer_s=WORK_S)

    def workers(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        return self._json("GET", "/api/v1/workers", {**wanted, "limit": _WORKERS_MAX}, answer_s=WORK_S)

    def accounts(self) -> Iterator[dict[str, Any]]:
        return self._pages("/api/v1/accounts", {})

    def message(self, message: str, *, bodies: bool) -> dict[str, Any]:
        members = {"bodies": "true"} if bodies else {}
        return self._json("GET", f"/api/v1/messages/{quote(message, safe='')}", members, answer_s=WORK_S)

    def sends(self, deduplication_id: str, queue: str | None) -> dict[str, Any]:
        members = {"deduplication_id": deduplication_id, "queue": queue}
        return self._json("GET", "/api/v1/messages", members, answer_s=WORK_S)

    def trace(self, message: str) -> dict[str, Any]:
        return self._json("GET", f"/api/v1/trace/{quote(message, safe='')}", {}, answer_s=WORK_S)

    def events(self, start: str, limit: int, follow_s: float, wanted: Mapping[str, str] = EVERYTHING) -> Piece:
        members = {"from": start, "limit": limit, "follow": follow_s, **wanted}
        answer, body = self._ask("GET", "/api/v1/events", members, answer_s=ANSWER_S + follow_s)
        epoch = answer.headers.get("veilmq-epoch", "")
        first, following = (self._number(answer, name) for name in ("veilmq-start-offset", "veilmq-next-offset"))
        return Piece(body, first, following, epoch)

    def accept_clock(self, command_id: str) -> dict[str, Any]:
        return self._json("POST", "/api/v1/clock/accept", {}, b"{}", command_id=command_id)

    def console_link(self) -> str:
        """The address of the console that signs in once, within two minutes. Raises Failure."""
        path = self._json("POST", "/console/links", {}, b"{}")["path"]
        host = self._connection.host
        scheme = "https" if isinstance(self._connection, http.client.HTTPSConnection) else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._connection.port}{path}"


def _path_of(queue: QueueKey) -> str:
    return "/api/v1/queues/" + "/".join(quote(part, safe="") for part in (queue.account, queue.region, queue.name))
