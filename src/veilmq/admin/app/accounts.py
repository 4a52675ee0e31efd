"""Routes of accounts: the caller's own one, and a list with keys, grants, and how much each has of what it may have.

Strategy: from the keys that the server uses, and from counts that the store keeps. What is shown of a key is its id and
what it was granted: no secret, no session token, no Azure key. Who may see all accounts needs `settings`; any other key
sees itself and its account.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Final

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from veilmq.admin.access import Caller
from veilmq.admin.answers import answer, caller_of, members_of
from veilmq.admin.api import Refused
from veilmq.admin.api.inputs import PAGE_MAX, Account, convert
from veilmq.admin.service import Account as KnownAccount
from veilmq.admin.service import Keys, Service, home_region, knows
from veilmq.model.settings.access import EVERYTHING, AccessKey, Action, Grant
from veilmq.server.config.settings import Settings
from veilmq.store.reader import AccountCounts

NOTHING: Final = AccountCounts(0, 0, 0)


class AccountInput(Struct, kw_only=True, forbid_unknown_fields=True):
    """The account; default: the only one."""

    account: Account | None = None


class AccountsInput(AccountInput, kw_only=True):
    """A page of accounts by id, or one of them."""

    after: Account | None = None
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = PAGE_MAX


class Accounts:
    """The routes."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self._service = service
        self._limits = AccountCounts(
            settings.queues_per_account_max, settings.topics_per_account_max, settings.subscriptions_per_account_max
        )._asdict()

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/api/v1/account", self.own, methods=["GET"]),
            Route("/api/v1/accounts", self.listed, methods=["GET"]),
        ]

    async def own(self, request: Request) -> Response:
        """The default account (null if there are several), its home region, and whether the credentials file has it."""
        caller, keys = caller_of(request), self._service.keyring
        account = convert(members_of(request), AccountInput).account or caller.home
        _check(caller, account)
        if account is None:
            accounts = [each.id for each in keys.accounts]
            return answer({"account": None, "region": None, "known": None, "accounts": accounts})
        region, known = home_region(keys, account), knows(keys, account)
        return answer({"account": account, "region": region, "known": known})

    async def listed(self, request: Request) -> Response:
        """The accounts that the caller may see: those of the credentials file, and others that have anything."""
        caller, keys = caller_of(request), self._service.keyring
        wanted = convert(members_of(request), AccountsInput)
        own = caller.key if caller.key is not None and not caller.may(Action.SETTINGS) else None
        account = wanted.account or (None if own is None else own.account)
        if own is not None:
            _check(caller, account)
        counts = self._service.reader.per_account()
        known = {each.id: each for each in keys.accounts}
        ids = sorted(known.keys() | counts.keys()) if account is None else [account]
        ids = [each for each in ids if each > (wanted.after or "")]
        page, more = ids[: wanted.limit], len(ids) > wanted.limit
        shown = [_shown(keys, each, known.get(each), own) | counts.get(each, NOTHING)._asdict() for each in page]
        return answer(
            {
                "checks": keys.checks,
                "limits": self._limits,
                "accounts": shown,
                "more": more,
                "after": page[-1] if more else None,
            }
        )


def _check(caller: Caller, account: str | None) -> None:
    """Raises Refused (403) for a key of another account."""
    if caller.key is not None and account != caller.key.account:
        raise Refused(403, "not_granted", "the key is another account's")


def _shown(keys: Keys, account: str, known: KnownAccount | None, own: AccessKey | None) -> dict[str, Any]:
    """own: the only key to be shown; None: all of them."""
    shown: dict[str, Any] = {"id": account, "home_region": home_region(keys, account), "known": knows(keys, account)}
    if own is not None:
        return shown | {"azure_name": None, "azure_keys": 0, "keys": _shown_keys([own]), "identities": []}
    if known is None:
        return shown | {"azure_name": None, "azure_keys": 0, "keys": [], "identities": []}
    return shown | {
        "azure_name": known.azure_name,
        "azure_keys": len(known.azure_keys),
        "keys": _shown_keys(known.keys),
        "identities": _shown_keys(known.identities),
    }


def _shown_keys(keys: Iterable[AccessKey]) -> list[dict[str, Any]]:
    return [
        {
            "id": key.id,
            "temporary": key.session_token is not None,
            "everything": key.grants == EVERYTHING,
            "grants": [_shown_grant(grant) for grant in key.grants],
        }
        for key in keys
    ]


def _shown_grant(grant: Grant) -> dict[str, Any]:
    return {"actions": sorted(grant.actions), "queues": list(grant.queues)}
