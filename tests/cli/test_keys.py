"""A new key goes into a credentials file as it is printed."""

import json
from pathlib import Path

import pytest

from veilmq.cli.exits import Failure
from veilmq.cli.keys import new_key
from veilmq.server.credentials import Credentials


@pytest.mark.parametrize("account", [None, "111111111111"])
def test_what_is_printed_is_a_credentials_file(tmp_path: Path, account: str | None) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(new_key(account, as_json=False))
    path.chmod(0o600)
    (read,) = Credentials(path).accounts
    (key,) = read.keys
    assert read.id == (account or read.id)
    assert read.id != "000000000000"
    assert len(key.secret) >= 40


def test_no_two_are_the_same() -> None:
    made = [json.loads(new_key("111111111111", as_json=True)) for _ in range(100)]
    assert len({key["id"] for key in made}) == len({key["secret"] for key in made}) == 100


def test_an_account_has_12_digits() -> None:
    with pytest.raises(Failure, match="12 digits"):
        new_key("1111", as_json=False)
