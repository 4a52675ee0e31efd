"""/api/v1/accounts: keys and grants, never a secret, and only to who may see them."""

from pathlib import Path

import httpx
from tests.admin.conftest import client
from tests.admin.server import Keys, got, running

from veilmq.model.settings.access import EVERYTHING, AccessKey, Action, Grant
from veilmq.server.auth import Account
from veilmq.server.config.settings import Settings

ONE, TWO, LOST = "111111111111", "222222222222", "333333333333"
NARROW = AccessKey("narrow", "secret-narrow", ONE, grants=(Grant(frozenset({Action.SEND, Action.PEEK}), ("a-*", "b")),))
WIDE = AccessKey("wide", "secret-wide", ONE, grants=EVERYTHING, session_token="secret-token")
AUDITOR = AccessKey("auditor", "secret-auditor", TWO, grants=(Grant(frozenset({Action.SETTINGS})),))
OBJECT = AccessKey("an-object", "", ONE, grants=())


class File(Keys):
    """As a credentials file has them."""

    @property
    def accounts(self) -> tuple[Account, ...]:
        first = Account(ONE, "eu-west-1", "example", (b"secret-azure",) * 2, (NARROW, WIDE), (OBJECT,))
        return (first, Account(TWO, keys=(AUDITOR,)))


def test_keys_and_grants_without_a_secret(tmp_path: Path) -> None:
    settings = Settings(queues_per_account_max=7)
    with running(tmp_path / "data", File(NARROW, WIDE, AUDITOR), settings) as server, client(server) as http:
        for name in ("a", "b"):
            assert http.put(f"/api/v1/queues/{ONE}/eu-west-1/{name}").status_code == 201
        answer = http.get("/api/v1/accounts")
        assert "secret" not in answer.text
        found = answer.json()
        assert (found["checks"], found["limits"]["queues"], found["more"]) == (True, 7, False)
        one, two = found["accounts"]
        assert (one["id"], one["home_region"], one["azure_name"], one["azure_keys"]) == (ONE, "eu-west-1", "example", 2)
        assert (one["queues"], one["topics"], two["queues"]) == (2, 0, 0)
        narrow, wide = one["keys"]
        assert narrow["grants"] == [{"actions": ["peek", "send"], "queues": ["a-*", "b"]}]
        assert (narrow["everything"], wide["everything"], wide["temporary"]) == (False, True, True)
        assert one["identities"] == [{"id": "an-object", "temporary": False, "everything": False, "grants": []}]
        first = got(http, "/api/v1/accounts", limit=1)
        assert ([each["id"] for each in first["accounts"]], first["after"]) == ([ONE], ONE)
        assert [each["id"] for each in got(http, "/api/v1/accounts", after=ONE)["accounts"]] == [TWO]


def test_an_account_that_no_key_reaches_is_shown(tmp_path: Path) -> None:
    with running(tmp_path / "data", None) as server, client(server) as http:
        assert http.put(f"/api/v1/queues/{LOST}/us-east-1/left").status_code == 201
        assert [each["id"] for each in got(http, "/api/v1/accounts")["accounts"]] == ["000000000000", LOST]
    with running(tmp_path / "data", File(NARROW)) as server, client(server) as http:
        (lost,) = got(http, "/api/v1/accounts", account=LOST)["accounts"]
        assert (lost["known"], lost["queues"], lost["keys"]) == (False, 1, [])


def test_a_key_sees_itself_and_one_with_settings_all(tmp_path: Path) -> None:
    with running(tmp_path / "data", File(NARROW, WIDE, AUDITOR)) as server:

        def accounts(key: AccessKey, **members: str) -> httpx.Response:
            return httpx.get(f"{server.url}/api/v1/accounts", params=members, auth=(key.id, key.secret))

        (own,) = accounts(NARROW).json()["accounts"]
        assert (own["id"], [each["id"] for each in own["keys"]], own["identities"]) == (ONE, ["narrow"], [])
        assert accounts(NARROW, account=TWO).status_code == 403
        assert [each["id"] for each in accounts(AUDITOR).json()["accounts"]] == [ONE, TWO]
