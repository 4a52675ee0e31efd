"""New access keys, and new keys for encrypted queues."""

import base64
import errno
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any, Final

from veilmq.cli.failures import Exit, Failure, advice_on, closed_to_user, may, unwritable
from veilmq.client.encrypted.keys import Key, Keys, add_key
from veilmq.client.encrypted.keys import as_json as json_of
from veilmq.client.encrypted.keys import new_key as new_encryption_key
from veilmq.client.errors import KeyFileInvalid
from veilmq.model.errors import ParameterInvalid
from veilmq.server.auth import check_text
from veilmq.server.config import FileInvalid, LineNumbers, parse_toml, read_text
from veilmq.store.files import durable_write

_ID_BYTES: Final = 10
_SECRET_BYTES: Final = 30
_ACCOUNT: Final = re.compile("[0-9]{12}")


def new_key(account: str | None, *, as_json: bool, into: Path | None = None) -> str:
    """A key of 80 random bits of id and 240 of secret, as TOML to add to a credentials file, or as JSON.

    into: add it to that file; the returned text then has no secret. Raises Failure for an account that is not 12
    digits, or a file that cannot be used.
    """
    if account is not None and not _ACCOUNT.fullmatch(account):
        raise Failure(
            Exit.USAGE, "--account: expected 12 digits", "For example: veilmq keys new --account 111111111111"
        )
    # A generated account does not begin with 0: nobody may own the account of development mode.
    of = account or str(secrets.randbelow(9 * 10**11) + 10**11)
    key_id = "VQ" + base64.b32encode(secrets.token_bytes(_ID_BYTES)).decode()
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    if into is not None:
        _add(into, of, key_id, secret)
        shown = {"file": str(into), "account": of, "id": key_id}
        return json.dumps(shown) if as_json else f"{into}: added key {key_id} of account {of}"
    if as_json:
        return json.dumps({"account": of, "id": key_id, "secret": secret})
    return (
        "# For a credentials file of mode 0600. If the account is there already, add only the key, below it.\n"
        + _account_table(of)
        + "\n"
        + _key_table(key_id, secret).rstrip()
    )


def _account_table(account: str) -> str:
    return f'[[account]]\nid = "{account}"\n'


def _key_table(key_id: str, secret: str) -> str:
    return f'[[account.key]]\nid = "{key_id}"\nsecret = "{secret}"\n'


def _add(path: Path, account: str, key_id: str, secret: str) -> None:
    """Add the key to a credentials file, or make the file with mode 0600, atomically.

    Raises Failure and then changes nothing.
    """
    try:
        text = read_text(path, private=True) if path.exists() else ""
        there = _checked(path, text)
        accounts = [each["id"] for each in there.get("account", [])]
        added = _with_key(text, accounts, account, _key_table(key_id, secret))
        if not _is_added(there, _checked(path, added), account):
            raise ValueError
    except FileInvalid as error:
        what = "" if error.errno else "no credentials file that a server takes: "
        raise Failure(Exit.USAGE, f"--into: {what}{error}", advice_on(path, "Nothing was changed.")) from None
    except (ValueError, LookupError, TypeError):
        message = f"--into: {path} is no credentials file that a key can be added to"
        raise Failure(Exit.USAGE, message, "Nothing was changed. Leave --into out, and add what is printed.") from None
    except OSError as error:
        raise _unwritten(path, error) from None
    try:
        durable_write(path.resolve(), added.encode(), keeps_owner=True)
    except OSError as error:
        raise _unwritten(path, error) from None


def _checked(path: Path, text: str) -> dict[str, Any]:
    """The contents of a credentials file, which may be empty. Raises FileInvalid if a server would refuse it."""
    there, _ = parse_toml(path, text)
    if there:
        check_text(path, text)
    return there


def _unwritten(path: Path, error: OSError) -> Failure:
    """The file is written beside its place first: what denies that is the directory."""
    closed, parent = closed_to_user(path), path.resolve().parent
    if not closed and error.errno in {errno.EACCES, errno.EROFS} and not may(parent, os.W_OK | os.X_OK):
        closed = unwritable(parent)
    return Failure(Exit.USAGE, f"--into: {path}: {error.strerror}", closed or "Check the path.")


def _with_key(text: str, accounts: list[str], account: str, key: str) -> str:
    """The text with the key below its account; a new account comes last."""
    if text and not text.endswith("\n"):
        text += "\n"
    if account not in accounts:
        return text + ("\n" if text else "") + _account_table(account) + "\n" + key
    following = accounts.index(account) + 1
    header = LineNumbers(text).of("account", following) if following < len(accounts) else None
    lines = text.splitlines(keepends=True)
    end = len(lines) if header is None else header - 1
    while header is not None and lines[end - 1].lstrip().startswith("#"):
        end -= 1  # a comment above the next account belongs to that one
    before, after = "".join(lines[:end]), "".join(lines[end:])
    return before + ("" if before.endswith("\n\n") else "\n") + key + ("\n" if after else "") + after


def _is_added(before: dict[str, Any], after: dict[str, Any], account: str) -> bool:
    """Whether `after` is `before` with one more key of that account."""
    there = [each for each in before.get("account", []) if each["id"] == account]
    (found,) = (each for each in after["account"] if each["id"] == account)
    keys = found.pop("key")
    found |= {"key": keys[:-1]} if len(keys) > 1 else {}
    if not there:
        after["account"].remove(found)
    return {"account": [], **before} == after


def new_encryption(algorithm: str, into: Path | None, *, encrypts: bool, as_json: bool) -> str:
    """Make a key for encrypted queues: add it to the file and return its summary, or return the JSON of a file with
    only this key.

    Raises Failure for an unknown algorithm, an unusable file, or a single key that may not encrypt.
    """
    if into is None and not encrypts:
        raise Failure(Exit.USAGE, "--decrypts-only: name the file of the key that encrypts with --into FILE")
    try:
        key = new_encryption_key(algorithm)
        if into is None:
            return json_of(Keys(key)).rstrip()
        held = add_key(into, key, encrypts=encrypts)
    except ParameterInvalid as error:
        raise Failure(Exit.USAGE, f"--{error.parameter}: {error.reason}") from None
    except KeyFileInvalid as error:
        raise Failure(Exit.USAGE, str(error), "Nothing was changed.") from None
    if as_json:
        return json.dumps({"file": str(into), "added": key.id, "encrypts": held.newest.id, "keys": len(list(held))})
    return f"{into}: added {_described(key)}; {_described(held.newest)} encrypts, {len(list(held))} decrypt"


def _described(key: Key) -> str:
    return f"{key.id} ({key.algorithm})"
