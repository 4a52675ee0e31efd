"""A new key goes into a credentials file as it is printed, or into a file of keys for encrypted queues."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.users import other_user

from veilmq.cli.failures import Failure
from veilmq.cli.keys import new_encryption, new_key
from veilmq.client.encrypted import Keys
from veilmq.server.auth import Credentials
from veilmq.testing.for_each import for_each


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


class TestInto:
    def test_a_new_file_is_closed_to_others_and_holds_the_key_that_is_told(self, tmp_path: Path) -> None:
        path = tmp_path / "credentials.toml"
        told = json.loads(new_key("111111111111", as_json=True, into=path))
        (account,) = Credentials(path).accounts  # which refuses a file that is open to others
        assert told == {"file": str(path), "account": account.id, "id": account.keys[0].id}
        assert account.keys[0].secret not in new_key("111111111111", as_json=False, into=path)

    def test_a_key_goes_below_its_own_account(self, tmp_path: Path) -> None:
        path = tmp_path / "credentials.toml"
        for account in ("111111111111", "222222222222", "111111111111", "222222222222", "111111111111"):
            new_key(account, as_json=False, into=path)
        assert [(each.id, len(each.keys)) for each in Credentials(path).accounts] == [
            ("111111111111", 3), ("222222222222", 2)
        ]  # fmt: skip
        assert [each.name for each in tmp_path.iterdir()] == ["credentials.toml"]

    def test_a_comment_stays_with_its_account(self, tmp_path: Path) -> None:
        path = tmp_path / "credentials.toml"
        first, second = '[[account]]\nid = "111111111111"\n', '# the shop\n[[account]]\nid = "222222222222"'
        path.write_text(f"{first}\n{second}")
        path.chmod(0o600)
        new_key("111111111111", as_json=False, into=path)
        text = path.read_text()
        assert text.startswith(first)
        assert text.endswith(second + "\n")
        assert len(Credentials(path).accounts[0].keys) == 1

    @for_each(
        ("content", "mode", "match"),
        [
            ('[[account]]\nid = "111111111111"', 0o640, "chmod 600"),
            ('[[account]]\nid = "111111111111"\nkey = [{ id = "a", secret = "s3cret" }]', 0o600, "no credentials file"),
            ("s3cret", 0o600, "no credentials file"),
            ('sqs = "127.0.0.1:9324"\n', 0o600, "line 1: unknown table sqs"),
            ('[accounts.one]\nid = "111111111111"\n', 0o600, "unknown table accounts"),
            ('[[account]]\nid = "111111111111"\nhome = "us-east-1"\n', 0o600, "line 3: .*unknown field home"),
        ],
    )
    def test_what_cannot_take_a_key_stays_as_it_was(self, tmp_path: Path, content: str, mode: int, match: str) -> None:
        path = tmp_path / "credentials.toml"
        path.write_text(content)
        path.chmod(mode)
        with pytest.raises(Failure, match=match) as refused:
            new_key("111111111111", as_json=False, into=path)
        assert "s3cret" not in str(refused.value) + refused.value.advice
        assert path.read_text() == content

    def test_a_file_of_comments_is_begun(self, tmp_path: Path) -> None:
        path = tmp_path / "credentials.toml"
        path.write_text("# Who may do what\n")
        path.chmod(0o600)
        new_key("111111111111", as_json=False, into=path)
        assert path.read_text().startswith("# Who may do what\n")
        assert [each.id for each in Credentials(path).accounts] == ["111111111111"]

    def test_the_closed_directory_is_named(self, reachable: Path) -> None:
        closed = reachable / "closed"
        (closed / "below").mkdir(parents=True)
        closed.chmod(0)
        with other_user(), pytest.raises(Failure) as refused:
            new_key(None, as_json=False, into=closed / "below" / "keys.toml")
        assert refused.value.advice.startswith(f"{closed} is closed to this user")

    def test_the_file_keeps_its_owner(self, tmp_path: Path) -> None:
        path = tmp_path / "credentials.toml"
        new_key("111111111111", as_json=False, into=path)
        if os.geteuid() == 0:  # as after `chown veilmq:`; another user cannot give a file away
            os.chown(path, 65_534, 65_534)
        owner = path.stat().st_uid
        new_key("111111111111", as_json=False, into=path)
        assert path.stat().st_uid == owner
        assert path.stat().st_mode & 0o777 == 0o600


class TestEncryption:
    def test_what_is_printed_is_a_file_of_keys(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.json"
        path.write_text(new_encryption("A256GCM", None, encrypts=True, as_json=False))
        path.chmod(0o600)
        (key,) = Keys.read(path)
        assert (key.algorithm, len(key.secret)) == ("A256GCM", 32)

    def test_a_rotation_in_two_steps(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.json"
        new_encryption("A256GCM", path, encrypts=True, as_json=False)
        assert path.stat().st_mode & 0o777 == 0o600
        first = Keys.read(path).newest
        said = new_encryption("A256CBC-HS512", path, encrypts=False, as_json=False)
        assert Keys.read(path).newest == first
        assert f"{first.id} (A256GCM) encrypts, 2 decrypt" in said
        new_encryption("A256GCM", path, encrypts=True, as_json=False)
        assert len(list(Keys.read(path))) == 3
        assert Keys.read(path).newest != first
        assert [each.name for each in tmp_path.iterdir()] == ["keys.json"]

    @pytest.mark.parametrize(
        ("algorithm", "content", "match"),
        [("none", None, "--algorithm"), ("A256GCM", "no JSON", "not JSON"), ("A256GCM", '{"keys": [{}]}', "kid")],
    )
    def test_what_cannot_be_used_is_refused(
        self, tmp_path: Path, algorithm: str, content: str | None, match: str
    ) -> None:
        path = tmp_path / "keys.json"
        if content is not None:
            path.write_text(content)
            path.chmod(0o600)
        with pytest.raises(Failure, match=match):
            new_encryption(algorithm, path, encrypts=True, as_json=False)
        assert (path.read_text() if path.exists() else None) == content

    def test_a_file_that_is_open_to_others_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.json"
        new_encryption("A256GCM", path, encrypts=True, as_json=False)
        path.chmod(0o640)
        with pytest.raises(Failure, match="chmod 600"):
            new_encryption("A256GCM", path, encrypts=True, as_json=False)

    def test_programs_get_json(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.json"
        (first, second) = (
            json.loads(new_encryption("A256GCM", path, encrypts=encrypts, as_json=True)) for encrypts in (True, False)
        )
        assert first == {"file": str(path), "added": first["added"], "encrypts": first["added"], "keys": 1}
        assert second == {"file": str(path), "added": second["added"], "encrypts": first["added"], "keys": 2}
        assert second["added"] != first["added"]

    def test_a_directory_that_cannot_be_read_is_told(self, tmp_path: Path) -> None:
        place = tmp_path / "closed"
        place.mkdir(0)
        with other_user(), pytest.raises(Failure, match="cannot be written: Permission denied"):
            new_encryption("A256GCM", place / "keys.json", encrypts=True, as_json=False)
        assert list(place.iterdir()) == []

    def test_the_command(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.json"
        done = subprocess.run(
            [
                sys.executable, "-c", "from veilmq.cli import main; main()",
                "keys", "new", "--encryption", "--into", str(path),
            ],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert Keys.read(path).newest.id in done.stdout
