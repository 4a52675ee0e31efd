"""New access keys, and new keys for encrypted queues."""

import base64
import json
import re
import secrets
from pathlib import Path
from typing import Final

from veilmq.cli.exits import Exit, Failure
from veilmq.client.encrypted.keys import Key, Keys, add_key
from veilmq.client.encrypted.keys import as_json as json_of
from veilmq.client.encrypted.keys import new_key as new_encryption_key
from veilmq.client.errors import KeyFileInvalid
from veilmq.model.errors import ParameterInvalid

_ID_BYTES: Final = 10
_SECRET_BYTES: Final = 30
_ACCOUNT: Final = re.compile("[0-9]{12}")


def new_key(account: str | None, *, as_json: bool) -> str:
    """A key of 80 random bits of id and 240 of secret, as TOML to add to a credentials file, or as JSON.

    Raises Failure for an account that is not 12 digits.
    """
    if account is not None and not _ACCOUNT.fullmatch(account):
        raise Failure(
            Exit.USAGE, "--account: expected 12 digits", "For example: veilmq keys new --account 111111111111"
        )
    # Nobody may own the account of development mode, so a made-up one does not begin with 0.
    of = account or str(secrets.randbelow(9 * 10**11) + 10**11)
    key_id = "VQ" + base64.b32encode(secrets.token_bytes(_ID_BYTES)).decode()
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    if as_json:
        return json.dumps({"account": of, "id": key_id, "secret": secret})
    return (
        "# For a credentials file of mode 0600. If the account is there already, add only the key, below it.\n"
        f'[[account]]\nid = "{of}"\n\n[[account.key]]\nid = "{key_id}"\nsecret = "{secret}"'
    )


def new_encryption(algorithm: str, into: Path | None, *, encrypts: bool, as_json: bool) -> str:
    """A key for encrypted queues: added to the file, and what is in it now; or else the JSON of a file with it alone.

    Raises Failure: no such algorithm, a file that cannot be used, or a lone key that is not to encrypt.
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
