"""The file of keys: what it must be, and how a change of it arrives."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from veilmq.client.adapters.embedded import EmbeddedAccount
from veilmq.client.encrypted import ALGORITHMS, EncryptedQueue, Key, KeyFile, Keys, add_key, new_key
from veilmq.client.encrypted.keys import FILE_BYTES_MAX, as_json
from veilmq.client.errors import KeyFileInvalid
from veilmq.client.unreadable import keep
from veilmq.model.errors import ParameterInvalid
from veilmq.testing.client_contract import for_each

ENTRY = {"kty": "oct", "use": "enc", "alg": "dir", "enc": "A128GCM", "kid": "k", "k": "AAECAwQFBgcICQoLDA0ODw"}
SECRET = "AAECAwQFBgcICQoLDA0ODw"


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


class TestFile:
    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        keys = Keys(*(new_key(algorithm) for algorithm in ALGORITHMS))
        assert list(Keys.read(written(tmp_path / "keys", as_json(keys)))) == list(keys)

    def test_a_jwk_set_made_elsewhere(self, tmp_path: Path) -> None:
        few = {name: ENTRY[name] for name in ("kty", "kid", "enc", "k")}
        (key,) = Keys.read(written(tmp_path / "keys", json.dumps({"keys": [few]})))
        assert key == Key("k", bytes(range(16)), "A128GCM")

    @for_each("mode", [0o640, 0o604, 0o660, 0o644, 0o601])
    def test_open_to_others(self, tmp_path: Path, mode: int) -> None:
        with pytest.raises(KeyFileInvalid, match="chmod 600"):
            Keys.read(written(tmp_path / "keys", as_json(Keys(new_key())), mode))

    @for_each(
        "content, reason",
        [
            ("", "not JSON"),
            ("[]", "not JSON"),
            ("{}", "not JSON"),
            ('{"keys": {}}', "not JSON"),
            ("[" * 100_000, "not JSON"),
            ('{"keys": []}', "one at least"),
            ('{"keys": ["x"]}', r"keys\[0\] is not an object"),
            ({"kty": "RSA"}, r"keys\[0\].kty"),
            ({"alg": "A256KW"}, r"keys\[0\].alg"),
            ({"use": "sig"}, r"keys\[0\].use"),
            ({"kid": None}, r"keys\[0\].kid"),
            ({"kid": "a b"}, r"keys\[0\]: id"),
            ({"kid": ""}, r"keys\[0\]: id"),
            ({"enc": "A256GCM"}, "takes a key of 32 bytes"),
            ({"enc": "ROT13"}, "algorithm"),
            ({"k": SECRET + "!"}, "base64url"),
            ({"k": SECRET + "é"}, "base64url"),
            ({"k": 7}, r"keys\[0\].k"),
        ],
    )
    def test_what_it_must_be(self, tmp_path: Path, content: str | dict[str, Any], reason: str) -> None:
        text = content if isinstance(content, str) else json.dumps({"keys": [{**ENTRY, **content}]})
        with pytest.raises(KeyFileInvalid, match=reason) as caught:
            Keys.read(written(tmp_path / "keys", text))
        assert SECRET not in str(caught.value)

    def test_two_of_one_id(self, tmp_path: Path) -> None:
        with pytest.raises(KeyFileInvalid, match="same id"):
            Keys.read(written(tmp_path / "keys", json.dumps({"keys": [ENTRY, ENTRY]})))
        with pytest.raises(ParameterInvalid, match=r"must be Keys\(key, ...\), not list"):
            Keys([new_key()])  # type: ignore[arg-type]

    def test_too_long(self, tmp_path: Path) -> None:
        with pytest.raises(KeyFileInvalid, match="longer"):
            Keys.read(written(tmp_path / "keys", " " * (FILE_BYTES_MAX + 1)))

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(KeyFileInvalid, match="cannot be read"):
            Keys.read(tmp_path / "keys")

    def test_a_directory_that_cannot_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(KeyFileInvalid, match="cannot be written"):
            add_key(tmp_path / "missing" / "keys", new_key())

    def test_no_repr_shows_a_secret(self, tmp_path: Path) -> None:
        key = Key("k", b"secretsecretsecr", "A128GCM")
        path = tmp_path / "keys"
        add_key(path, key)
        assert not [text for text in map(repr, (key, Keys(key), KeyFile(path))) if "secretsecret" in text]


class TestKeyFile:
    def test_a_rotation_needs_no_restart(self, tmp_path: Path) -> None:
        path = tmp_path / "keys"
        add_key(path, new_key())
        with EmbeddedAccount(tmp_path / "data") as account:
            account.create("orders")
            queue = EncryptedQueue(account.queue("orders"), KeyFile(path), unreadable=keep)
            queue.send("old")
            before = KeyFile(path).newest
            new = new_key()
            add_key(path, new)
            queue.send("new")
            assert {message.body for message in queue.receive(10)} == {"old", "new"}
            assert KeyFile(path).newest == new != before

    def test_a_bad_file_changes_nothing(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = tmp_path / "keys"
        add_key(path, new_key())
        keys = KeyFile(path)
        first = keys.newest
        replacement = written(tmp_path / "new", "nothing")
        os.replace(replacement, path)
        assert keys.newest == first
        assert "the keys stay as they were" in caplog.text
        path.unlink()
        assert keys.find(first.id) == first
        add_key(path, new_key())
        assert keys.newest != first

    def test_what_could_not_be_read_is_tried_again(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = tmp_path / "keys"
        old, new = new_key(), new_key()
        add_key(path, old)
        keys = KeyFile(path)
        os.replace(written(tmp_path / "new", as_json(Keys(old, new)), 0o644), path)
        for _ in range(3):
            assert keys.find(new.id) is None
        assert caplog.text.count("the keys stay as they were") == 1
        path.chmod(0o600)  # what the log advises; neither time nor size change
        assert keys.newest == new


def test_an_unknown_algorithm() -> None:
    with pytest.raises(ParameterInvalid, match="algorithm"):
        new_key("ROT13")
