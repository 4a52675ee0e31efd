"""The credentials file: what it may hold, what its errors say (never a secret), and reloading."""

import asyncio
import logging
import os
import threading
from pathlib import Path

import pytest

from veilmq.model.settings.access import DEVELOPMENT_ACCOUNT, OF_ALL_ACCOUNTS, Action
from veilmq.server.auth import DEVELOPMENT_KEYS_MAX, Credentials, DevelopmentKeyring
from veilmq.server.config import FileInvalid
from veilmq.testing.for_each import for_each

GOOD = """\
[[account]]
id = "111111111111"
home_region = "eu-west-1"
azure_name = "examplename"
azure_keys = ["aHVzaGh1c2g=", "aHVzaGh1c2gy"]

[[account.key]]
id = "AK1"
secret = "hush-one"

[[account.key]]
id = "AK2"
secret = "hush-two"
session_token = "hush-token"
grants = [{ actions = ["send"], queues = ["orders-*"] }, { actions = ["*"], queues = ["mine"] }]

[[account]]
id = "222222222222"

[[account.key]]
id = "AK3"
secret = "hush-three"
grants = []
"""

# What is replaced, by what, and what the error must hold.
BAD = [
    ('id = "222222222222"', 'id = "22"', ["line 18", "account 2", "id", "12 digits"]),
    ('id = "222222222222"', 'id = "222222222222\\n"', ["12 digits"]),
    ('id = "222222222222"', 'id = "111111111111"', ["line 18", "twice"]),
    ('id = "222222222222"', "", ["line 17", "account 2", "id"]),
    ('id = "AK3"', 'id = "AK1"', ["line 21", "account 222222222222, key 1", "twice"]),
    ('id = "AK3"', 'id = "A K"', ["line 21", "id"]),
    ('secret = "hush-two"', "secret = 5", ["line 13", "account 111111111111, key 2", "secret"]),
    ('secret = "hush-two"', 'secret = ""', ["line 13", "secret"]),
    ('secret = "hush-two"', 'sekret = "hush-two"', ["line 13", "unknown field sekret"]),
    ('secret = "hush-two"', 'secret = "hush-two', ["line 13", "not TOML"]),
    ('actions = ["send"]', 'actions = ["sent"]', ["line 15", "grants", "receive"]),
    ('actions = ["send"]', "actions = []", ["line 15", "grants"]),
    ('queues = ["mine"]', "queues = []", ["line 15", "grants"]),
    ('home_region = "eu-west-1"', 'home_region = "Mars"', ["line 3", "home_region"]),
    ('azure_name = "examplename"', "", ["azure_name", "belong together"]),
    ('azure_name = "examplename"', 'azure_name = "Example"', ["line 4", "azure_name"]),
    ('"aHVzaGh1c2gy"', '"hush!"', ["line 5", "azure_keys", "base64"]),
    ('"aHVzaGh1c2gy"', '"aHVzaGh1c2gy\u00a0"', ["line 5", "azure_keys", "base64"]),
    ('"aHVzaGh1c2g=", "aHVzaGh1c2gy"', "", ["line 5", "azure_keys"]),
    (', "aHVzaGh1c2gy"', ', "aHVzaGh1c2gy", "aHVzaGh1c2gz"', ["line 5", "azure_keys"]),
    ("[[account.key]]\nid", "[[account.keys]]\nid", ["unknown field keys"]),
    (GOOD, "", ["no [[account]]"]),
    (GOOD, 'account = "hush"', ["no [[account]]"]),
    (GOOD, "account = [5]", ["account 1"]),
    (GOOD, "[users]\n", ["line 1", "unknown table users"]),
    (GOOD, "\udcff", ["line 1", "UTF-8"]),
    (GOOD, "x = " + "[" * 10_000, ["not TOML"]),
    (GOOD, "x = " + "9" * 5_000, ["not TOML"]),
    (GOOD, 'x = """\n[' + " " * 60_000 + '"""', ["line 1", "unknown table x"]),  # with no backtracking over the blanks
]


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    path.chmod(mode)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "keys.toml", GOOD)


def test_one_azure_key_is_enough(tmp_path: Path) -> None:
    """The emulator's clients know one."""
    credentials = Credentials(write(tmp_path / "keys.toml", GOOD.replace(', "aHVzaGh1c2gy"', "")))
    named = credentials.find_account("examplename")
    assert named is not None
    assert named.secrets == (b"hushhush",)


def test_accounts_keys_and_grants(file: Path) -> None:
    credentials = Credentials(file)
    assert credentials.checks
    first, second = credentials.accounts
    assert (first.id, first.home_region, first.azure_name) == ("111111111111", "eu-west-1", "examplename")
    assert first.azure_keys == (b"hushhush", b"hushhush2")
    assert second.home_region == "us-east-1"
    one, two, three = (credentials.find(name) for name in ("AK1", "AK2", "AK3"))
    assert one is not None
    assert two is not None
    assert three is not None
    assert (one.secret, one.account, one.home_region) == ("hush-one", "111111111111", "eu-west-1")
    assert {action for action in Action if not one.allows(action, "any")} == OF_ALL_ACCOUNTS
    assert two.session_token == "hush-token"
    assert two.allows(Action.SEND, "orders-1")
    assert not two.allows(Action.SEND, "other")
    assert not two.allows(Action.RECEIVE, "orders-1")
    assert two.allows(Action.PURGE, "mine")
    assert not two.allows(Action.BACKUP, "mine"), "a backup holds every account: * does not mean it"
    assert not any(three.allows(action, None) for action in Action)
    assert credentials.find("AK4") is None
    assert credentials.sole_account is None


def test_a_backup_is_granted_by_its_name(tmp_path: Path) -> None:
    text = GOOD.replace('actions = ["*"]', 'actions = ["*", "backup"]')
    key = Credentials(write(tmp_path / "keys.toml", text)).find("AK2")
    assert key is not None
    assert key.allows(Action.BACKUP, None)
    assert key.allows(Action.PURGE, "mine")


def test_nothing_shows_a_secret(file: Path) -> None:
    credentials = Credentials(file)
    assert "hush" not in repr(credentials.accounts) + repr(credentials.find("AK2")) + repr(credentials)


@for_each(("old", "new", "told"), BAD)
def test_a_bad_file_is_refused_by_line_account_and_field(tmp_path: Path, old: str, new: str, told: list[str]) -> None:
    assert old in GOOD
    path = write(tmp_path / "keys.toml", GOOD.replace(old, new))
    with pytest.raises(FileInvalid) as refused:
        Credentials(path)
    assert str(path) in str(refused.value)
    for text in told:
        assert text in str(refused.value)
    assert "hush" not in str(refused.value)


@for_each("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "keys.toml", GOOD, mode)
    with pytest.raises(FileInvalid, match=f"chmod 600 {path}"):
        Credentials(path)


def test_a_stricter_mode_will_do(tmp_path: Path) -> None:
    assert Credentials(write(tmp_path / "keys.toml", GOOD, 0o400)).accounts


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileInvalid, match="cannot be read"):
        Credentials(tmp_path / "none.toml")
    with pytest.raises(FileInvalid, match="cannot be read"):
        Credentials(tmp_path)


def test_a_key_is_the_same_object_until_a_reload(file: Path) -> None:
    credentials = Credentials(file)
    key = credentials.find("AK1")
    assert credentials.find("AK1") is key
    write(file, GOOD.replace("hush-one", "hush-new"))
    assert asyncio.run(credentials.reload())
    changed = credentials.find("AK1")
    assert changed is not key
    assert changed is not None
    assert changed.secret == "hush-new"


def test_a_reload_reads_in_a_thread_and_takes_on_the_loop(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = Credentials(file)
    readers: list[threading.Thread] = []
    look = Credentials._look

    def noted(one: Credentials) -> object:
        readers.append(threading.current_thread())
        assert one.find("AK1") is not None
        return look(one)

    monkeypatch.setattr(Credentials, "_look", noted)
    write(file, GOOD.replace("hush-one", "hush-new"))

    async def twice() -> list[bool]:
        first = asyncio.ensure_future(credentials.reload())
        second = asyncio.ensure_future(credentials.reload())
        return [await first, await second]

    assert asyncio.run(twice()) == [True, True]
    assert threading.current_thread() not in readers
    changed = credentials.find("AK1")
    assert changed is not None
    assert changed.secret == "hush-new"
    os.remove(file)
    assert not asyncio.run(credentials.reload())
    assert credentials.find("AK1") is changed


def test_a_reading_that_hangs_keeps_nobody(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    credentials = Credentials(file)
    file.unlink()
    os.mkfifo(file, 0o600)  # whoever opens it waits until somebody writes: as on a mount that hangs
    hung = file.with_name("hung")

    def mended() -> None:
        file.rename(hung)
        write(file, GOOD.replace("hush-one", "hush-new"))

    async def reload() -> None:
        assert not await credentials.reload(deadline_s=0.01)
        assert f"{file} hangs" in caplog.text
        mended()
        assert await credentials.reload()

    asyncio.run(reload())  # which ends, though a thread still reads
    changed = credentials.find("AK1")
    assert changed is not None
    assert changed.secret == "hush-new"
    os.close(os.open(hung, os.O_RDWR | os.O_NONBLOCK))  # lets the thread end
    assert credentials.find("AK1") is changed


def test_a_bad_new_file_keeps_the_old_keys(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    credentials = Credentials(file)
    key = credentials.find("AK1")
    write(file, GOOD.replace('secret = "hush-one"', "secret = 1"))
    with caplog.at_level(logging.ERROR):
        assert not asyncio.run(credentials.reload())
    assert "line 9" in caplog.text
    assert "hush" not in caplog.text
    assert credentials.find("AK1") is key
    os.remove(file)
    assert not asyncio.run(credentials.reload())
    assert credentials.find("AK1") is key


def test_in_development_any_key_stands_for_an_account() -> None:
    keyring = DevelopmentKeyring()
    assert not keyring.checks
    assert keyring.find("anything").account == DEVELOPMENT_ACCOUNT
    assert keyring.find("123456789012").account == "123456789012"
    assert keyring.find("1234567890123").account == DEVELOPMENT_ACCOUNT
    assert keyring.find("anything") is keyring.find("anything")
    assert all(keyring.find("anything").allows(action, "q") for action in set(Action) - OF_ALL_ACCOUNTS)


def test_in_development_the_memory_is_bounded() -> None:
    keyring = DevelopmentKeyring()
    first = keyring.find("key 0")
    for number in range(1, DEVELOPMENT_KEYS_MAX):
        keyring.find(f"key {number}")
    assert keyring.find("key 0") is first
    keyring.find("one more")
    assert keyring.find("key 0") is not first


IDENTITY = """
[[account.identity]]
object_id = "11111111-2222-3333-4444-555555555555"

[[account.identity]]
object_id = "sender"
grants = [{ actions = ["send"], queues = ["orders"] }]
"""


def test_accounts_by_their_azure_name(file: Path) -> None:
    text = file.read_text()
    file.write_text(text.replace('\n[[account]]\nid = "222222222222"', f'{IDENTITY}\n[[account]]\nid = "222222222222"'))
    credentials = Credentials(file)
    named = credentials.find_account("examplename")
    assert named is not None
    assert named.secrets == (b"hushhush", b"hushhush2")
    assert (named.key.account, named.key.home_region, named.key.id) == ("111111111111", "eu-west-1", "examplename")
    assert "hush" not in repr(named)
    assert named.key.allows(Action.PURGE, "any")
    owner, sender = named.identity("11111111-2222-3333-4444-555555555555"), named.identity("sender")
    assert owner is not None
    assert owner.allows(Action.PURGE, "any")
    assert sender is not None
    assert sender.allows(Action.SEND, "orders")
    assert not sender.allows(Action.SEND, "other")
    assert not sender.allows(Action.RECEIVE, "orders")
    assert named.identity("nobody") is None
    assert credentials.find("sender") is None, "an object id is no access key"
    assert credentials.find_account("examplename") is named
    assert asyncio.run(credentials.reload())
    assert credentials.find_account("examplename") is not named
    assert credentials.find_account("other") is None


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"sender"', '"11111111-2222-3333-4444-555555555555"', "twice"),
        ('"sender"', '"a b"', "object_id"),
        ('object_id = "sender"', "", "object_id"),
        ('actions = ["send"]', 'actions = ["sent"]', "grants"),
        ("[[account.identity]]", '[[account]]\nid = "333333333333"\n[[account.identity]]', "azure_name"),
    ],
)
def test_bad_identities(file: Path, old: str, new: str, told: str) -> None:
    account = file.read_text().partition('\n[[account]]\nid = "222222222222"')[0]
    file.write_text(account + IDENTITY.replace(old, new))
    with pytest.raises(FileInvalid, match=told):
        Credentials(file)


def test_in_development_azure_has_the_account_of_all_emulators() -> None:
    keyring = DevelopmentKeyring()
    named = keyring.find_account("devstoreaccount1")
    assert named is not None
    assert named.key.account == DEVELOPMENT_ACCOUNT
    anybody = named.identity("anybody")
    assert anybody is not None
    assert anybody.allows(Action.PURGE, "any")
    assert keyring.find_account("devstoreaccount2") is None
