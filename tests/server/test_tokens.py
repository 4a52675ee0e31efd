"""Bearer tokens: genuine by an issuer's keys, or, in development mode, by their form."""

import asyncio
import base64
import json
import os
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, OctKey, RSAKey

from veilmq.protocols.azure.auth import TokenRefused
from veilmq.server.auth.tokens import IssuerTokens, NoTokens, UncheckedTokens, tokens_of
from veilmq.server.config import FileInvalid
from veilmq.server.config.settings import SettingInvalid, Settings
from veilmq.testing.for_each import for_each

ISSUER = "https://login.example"
CLAIMS = {"iss": ISSUER, "aud": "https://storage.azure.com", "oid": "me"}
NONE: frozenset[str] = frozenset()
EC = ECKey.generate_key("P-256", {"kid": "ec"})
RSA = RSAKey.generate_key(2048, {"kid": "rsa"})


def token(key: Any, algorithm: str, **claims: Any) -> str:
    return jwt.encode({"alg": algorithm, "kid": key.kid}, CLAIMS | claims, key, algorithms=[algorithm])


def raising(error: Exception) -> Any:
    def fail(*arguments: Any, **more: Any) -> None:
        raise error

    return fail


def part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """The issuer's key set."""
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [key.as_dict(private=False) for key in (EC, RSA)]}))
    return path


@pytest.mark.parametrize(("key", "algorithm"), [(EC, "ES256"), (RSA, "RS256"), (RSA, "PS256")])
def test_a_genuine_token(keys: Path, key: Any, algorithm: str) -> None:
    assert IssuerTokens(ISSUER, keys, NONE).claims(token(key, algorithm))["oid"] == "me"


def test_tokens_that_are_not(keys: Path) -> None:
    tokens = IssuerTokens(ISSUER, keys, NONE)
    good = token(EC, "ES256")
    header, payload, signature = good.split(".")
    stranger = ECKey.generate_key("P-256", {"kid": "ec"})
    public = OctKey.import_key(keys.read_bytes(), {"kid": "rsa"})
    for forged in (
        token(stranger, "ES256"),
        token(EC, "ES256", iss="https://elsewhere.example"),
        f"{header}.{part(CLAIMS | {'oid': 'root'})}.{signature}",
        f"{part({'alg': 'none'})}.{payload}.",
        token(public, "HS256"),
        f"{header}.{payload}",
        f"{header}.{payload}.{signature}.",
        "",
        "a.b.c",
        "\u00e9.\u00e9.\u00e9",
        "." * 1_000,
        "[" * 10_000,
    ):
        with pytest.raises(TokenRefused):
            tokens.claims(forged)
    assert tokens.claims(good)["oid"] == "me"


@for_each(
    "text",
    [
        "",
        "x",
        "[]",
        "{}",
        '{"keys": 1}',
        '{"keys": [1]}',
        '{"keys": [{"kty": "EC"}]}',
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_a_file_that_is_no_key_set(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(FileInvalid, match="no JSON Web Key Set"):
        IssuerTokens(ISSUER, path, NONE)
    with pytest.raises(FileInvalid):
        IssuerTokens(ISSUER, tmp_path / "missing.json", NONE)


def test_keys_that_could_not_be_read_are_tried_again(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = IssuerTokens(ISSUER, keys, NONE)
    new = ECKey.generate_key("P-256", {"kid": "new"})
    whole = json.dumps({"keys": [key.as_dict(private=False) for key in (EC, new)]})
    keys.write_text(whole[:-10])
    os.utime(keys, ns=(1, 1))
    for _ in range(3):
        with pytest.raises(TokenRefused):
            tokens.claims(token(new, "ES256"))
    assert caplog.text.count("stay as they were") == 1
    keys.write_text(whole)
    os.utime(keys, ns=(1, 1))  # a coarse clock: the repair has the time of the damage
    assert tokens.claims(token(new, "ES256"))["oid"] == "me"


def test_a_disk_that_never_answers_holds_up_nobody(keys: Path) -> None:
    """Anybody may send bad tokens."""
    tokens = IssuerTokens(ISSUER, keys, NONE)
    good, new = token(EC, "ES256"), ECKey.generate_key("P-256", {"kid": "new"})
    keys.unlink()
    os.mkfifo(keys)
    began = monotonic()
    for _ in range(1_000):
        with pytest.raises(TokenRefused):
            tokens.claims("a.b.c")
    assert monotonic() - began < 25, "one of them waits, and not each"
    assert [each.name for each in threading.enumerate()].count("veilmq-read") == 1
    assert tokens.claims(good)["oid"] == "me"
    with keys.open("w") as pipe:
        pipe.write(json.dumps({"keys": [new.as_dict(private=False)]}))
    deadline = monotonic() + 10
    while "veilmq-read" in [each.name for each in threading.enumerate()]:
        assert monotonic() < deadline
    assert tokens.claims(token(new, "ES256"))["oid"] == "me"


def test_a_disk_that_fails_for_a_while_is_asked_again(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = IssuerTokens(ISSUER, keys, NONE)
    new = ECKey.generate_key("P-256", {"kid": "new"})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", raising(TimeoutError(110, "Connection timed out")))
        with pytest.raises(TokenRefused):
            tokens.claims("a.b.c")
    keys.write_text(json.dumps({"keys": [new.as_dict(private=False)]}))
    os.utime(keys, ns=(1, 1))
    assert tokens.claims(token(new, "ES256"))["oid"] == "me"


def test_what_was_read_before_a_reload_does_not_count_after_it(keys: Path) -> None:
    """A slow disk answers with a key that the operator has taken out since."""
    tokens = IssuerTokens(ISSUER, keys, NONE)
    whole, old = keys.read_text(), token(EC, "ES256")
    keys.unlink()
    os.mkfifo(keys)
    with pytest.raises(TokenRefused):
        tokens.claims("a.b.c")
    with keys.open("w") as pipe:
        pipe.write(whole)
    deadline = monotonic() + 10
    while "veilmq-read" in [each.name for each in threading.enumerate()]:
        assert monotonic() < deadline
    keys.unlink()
    keys.write_text(json.dumps({"keys": [RSA.as_dict(private=False)]}))
    asyncio.run(tokens.reload())
    for _ in range(2):
        with pytest.raises(TokenRefused):
            tokens.claims(old)


def test_a_reload_that_is_overtaken_reads_again(keys: Path) -> None:
    """It read a key that was taken out before it ended, and that a bad token's look no longer saw."""
    tokens = IssuerTokens(ISSUER, keys, NONE)
    whole, old = keys.read_text(), token(EC, "ES256")
    keys.unlink()
    os.mkfifo(keys)

    def replace() -> None:
        keys.unlink()
        keys.write_text(json.dumps({"keys": [RSA.as_dict(private=False)]}))

    async def reload() -> None:
        reading = asyncio.ensure_future(tokens.reload())
        await asyncio.sleep(0)
        pipe = await asyncio.to_thread(keys.open, "w")
        await asyncio.to_thread(replace)
        with pytest.raises(TokenRefused):
            tokens.claims("a.b.c")
        with pipe:
            pipe.write(whole)
        await reading

    asyncio.run(reload())
    with pytest.raises(TokenRefused):
        tokens.claims(old)


def test_a_key_that_was_taken_out_counts_until_the_next_reload(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = IssuerTokens(ISSUER, keys, NONE)
    old = token(EC, "ES256")
    whole = keys.read_text()
    keys.write_text(whole[:-10])
    asyncio.run(tokens.reload())
    keys.unlink()
    os.mkfifo(keys)
    asyncio.run(tokens.reload(0.05))
    assert caplog.text.count("the issuer's keys stay as they were") == 2
    assert f"{keys} hangs" in caplog.text
    os.close(os.open(keys, os.O_WRONLY))  # lets the thread go
    keys.unlink()
    keys.write_text(json.dumps({"keys": [RSA.as_dict(private=False)]}))
    assert tokens.claims(old)["oid"] == "me", "nobody asked for the file"
    asyncio.run(tokens.reload())
    with pytest.raises(TokenRefused):
        tokens.claims(old)
    assert tokens.claims(token(RSA, "RS256"))["oid"] == "me"


def test_in_development_mode_claims_are_believed() -> None:
    tokens = UncheckedTokens(NONE)
    for subject in ("me", "you", "them"):  # of three lengths: base64 pads each in its own way
        claims = CLAIMS | {"oid": subject}
        assert tokens.claims(f"{part({'alg': 'none'})}.{part(claims)}.") == claims
    for text in ("", "a", "a.b", "a.b.c", "a.\u00e9.c", f"a.{part([1])}.c", "a.!.c", f"a.{'W' * 40_000}.c"):
        with pytest.raises(TokenRefused):
            tokens.claims(text)


def test_what_the_settings_say(keys: Path, tmp_path: Path) -> None:
    assert isinstance(tokens_of(Settings()), UncheckedTokens)
    credentials = tmp_path / "credentials.toml"
    assert isinstance(tokens_of(Settings(credentials=credentials)), NoTokens)
    with pytest.raises(TokenRefused, match="no issuer"):
        NoTokens().claims("a.b.c")
    checked = tokens_of(Settings(azure_issuer=ISSUER, azure_issuer_keys=keys, azure_audience="api://queues/"))
    assert isinstance(checked, IssuerTokens)
    assert checked.audiences == {"api://queues"}
    for half in ({"azure_issuer": ISSUER}, {"azure_issuer_keys": keys}):
        with pytest.raises(SettingInvalid):
            Settings(**half)
