"""New access keys."""

import base64
import json
import re
import secrets
from typing import Final

from veilmq.cli.exits import Exit, Failure

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
