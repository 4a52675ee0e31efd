"""What is configured, and what is in the data directory: owners and modes, credentials, certificate, queues.

Strategy: as in machine.py. Secrets are measured and compared, never shown.
"""

import base64
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from veilmq.cli.access import AdminAccess, Target, open_access
from veilmq.cli.access.direct import DirectAccess
from veilmq.cli.doctor import Finding, Level
from veilmq.cli.failures import check_directory
from veilmq.cli.output import duration
from veilmq.client.adapters.connect import DEVELOPMENT_KEYS
from veilmq.client.clock import SYSTEM
from veilmq.model.instant import MINUTE_US, SECOND_US
from veilmq.model.settings.queue import is_alias
from veilmq.protocols.mns.limits import NAME_WHOLE
from veilmq.protocols.sqs.limits import FIFO_QUEUE_NAME, QUEUE_NAME
from veilmq.server.auth import Account, Credentials
from veilmq.server.config import FileInvalid
from veilmq.server.config.settings import Settings
from veilmq.store.directory import Holder, is_held, read_holder

_SECRET_CHARACTERS_MIN: Final = 16
_WELL_KNOWN: Final = frozenset({"test", "secret", "password", "minioadmin", "localstack", "x", "any", "changeme"})
_PUBLIC: Final = frozenset(map(base64.b64decode, DEVELOPMENT_KEYS.values()))
"""Keys of Azure accounts that are printed in documentation."""
_ENDS_SOON_S: Final = 14 * 86_400
_SHOWN: Final = 5
_HEALTH_S: Final = 5


def holder_of(directory: Path) -> Holder | None:
    """The process that holds the directory; None if nobody does, or this user cannot see it."""
    try:
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return (read_holder(directory) or Holder(0)) if is_held(lock) else None
    finally:
        os.close(lock)


def directory(path: Path, holder: Holder | None) -> Iterator[Finding]:
    """Owner and mode of the data directory and of what is in it."""
    check_directory(path, "--data")
    if not path.is_dir():
        yield Finding("directory", Level.OK, f"{path} is made at the first start")
        return
    wrong = False
    status = path.stat()
    if status.st_mode & 0o077:
        wrong = True
        yield Finding("directory", Level.ERROR, f"{path} is open to other users", f"chmod 700 {path}")
    own, owner = os.geteuid(), status.st_uid
    others = sorted(each.name for each in path.iterdir() if each.lstat().st_uid != owner)
    if others or own not in (0, owner):
        wrong = True
        text = f"{path} belongs to uid {owner}" + (
            f", and {', '.join(others[:_SHOWN])} in it does not" if others else ""
        )
        fix = f"chown -R {owner if others else own} {path}" + ("" if others else f", or become uid {owner}")
        yield Finding("directory", Level.ERROR, text, fix)
    token = path / "admin-token"
    if token.exists() and token.stat().st_mode & 0o077:
        wrong = True
        yield Finding("directory", Level.ERROR, f"{token} is open to other users", f"chmod 600 {token}")
    if not wrong:
        state = "nobody holds it" if holder is None else f"held by pid {holder.pid}"
        yield Finding("directory", Level.OK, f"{path}: {state}")


def credentials(settings: Settings) -> Iterator[Finding]:
    """Whether keys are checked, and whether they can be guessed."""
    if settings.credentials is None:
        outside = [str(each) for each in settings.addresses().values() if not each.loopback]
        made = "veilmq keys new --into credentials.toml, then --credentials credentials.toml"
        if outside:
            text = f"none are checked (development mode), and {', '.join(outside)} can be reached from elsewhere"
            yield Finding("credentials", Level.WARNING, text, made)
        else:
            text = "none are checked (development mode): whoever is on this machine may do everything"
            yield Finding("credentials", Level.OK, text)
        return
    path = settings.credentials
    try:
        accounts = Credentials(path).accounts
    except FileInvalid as error:
        fix = f"veilmq keys new --into {path}" if not path.exists() else f"Then try: veilmq doctor --credentials {path}"
        yield Finding("credentials", Level.ERROR, str(error), fix)
        return
    new = f"veilmq keys new --account ID --into {path}, then take the old one out"
    weak = 0
    for key in (key for account in accounts for key in account.keys):
        if len(key.secret) < _SECRET_CHARACTERS_MIN or key.secret.lower() in _WELL_KNOWN:
            weak += 1
            text = f"the secret of key {key.id} has {len(key.secret)} characters and can be guessed"
            yield Finding("credentials", Level.ERROR, text, new)
    for text in (text for account in accounts for text in _guessed_azure(account)):
        weak += 1
        fix = f"Make one with `openssl rand -base64 64`, and put it into azure_keys in {path}"
        yield Finding("credentials", Level.ERROR, text, fix)
    if not any(account.keys or account.azure_keys or account.identities for account in accounts):
        weak += 1
        yield Finding(
            "credentials", Level.ERROR, f"{path} has no key: nobody gets in", f"veilmq keys new --into {path}"
        )
    if not weak:
        keys = sum(len(account.keys) + len(account.azure_keys) for account in accounts)
        yield Finding("credentials", Level.OK, f"{len(accounts)} accounts, {keys} keys")


def _guessed_azure(account: Account) -> Iterator[str]:
    for number, key in enumerate(account.azure_keys, 1):
        if key in _PUBLIC:
            yield f"azure_keys of {account.azure_name}: key {number} is the public one of Azurite"
        elif len(key) < _SECRET_CHARACTERS_MIN:
            yield f"azure_keys of {account.azure_name}: key {number} has {len(key)} bytes and can be guessed"


def certificate(settings: Settings) -> Iterator[Finding]:
    """Whether certificate and key belong together, and until when clients take it."""
    if settings.tls_cert is None or settings.tls_key is None:
        open_ports = [str(each) for each in settings.addresses().values() if not each.loopback]
        if open_ports and settings.insecure:
            text = f"none: what goes to {', '.join(open_ports)} can be read on the way"
            yield Finding("certificate", Level.WARNING, text, "--tls-cert FILE --tls-key FILE, or end TLS in a proxy.")
        return
    for each in (settings.tls_cert, settings.tls_key):
        try:
            each.open("rb").close()
        except FileNotFoundError:
            fix = "--tls-cert FILE and --tls-key FILE: check the path."
            yield Finding("certificate", Level.ERROR, f"{each} is not there", fix)
            return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key, password=b"")
    except ssl.SSLError as error:
        fix = "--tls-cert takes a PEM chain, the server's own certificate first; --tls-key its key, unencrypted."
        yield Finding("certificate", Level.ERROR, f"{settings.tls_cert} with {settings.tls_key}: {error.reason}", fix)
        return
    from cryptography import x509

    end = x509.load_pem_x509_certificates(settings.tls_cert.read_bytes())[0].not_valid_after_utc
    left_s = end.timestamp() - SYSTEM.wall()
    renew = "Put the new one in its place, and send SIGHUP to the server."
    text = f"{settings.tls_cert} is valid until {datetime.fromtimestamp(end.timestamp(), UTC):%Y-%m-%d %H:%M} UTC"
    if left_s < 0:
        yield Finding("certificate", Level.ERROR, f"{text}: clients refuse it", renew)
    elif left_s < _ENDS_SOON_S:
        yield Finding("certificate", Level.WARNING, f"{text}: {int(left_s // 86_400)} days are left", renew)
    else:
        yield Finding("certificate", Level.OK, text)
    if settings.tls_key.stat().st_mode & 0o077:
        text = f"{settings.tls_key} can be read by other users"
        yield Finding("certificate", Level.WARNING, text, f"chmod 600 {settings.tls_key}")


def health(holder: Holder | None) -> Iterator[Finding]:
    """What the running server says of itself."""
    admin = None if holder is None else holder.listeners.get("admin")
    if holder is None:
        yield Finding("server", Level.OK, "none runs on this directory")
        return
    if admin is None:
        return
    # It is the holder of this directory; its certificate names it for other machines.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    straight = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with straight.open(f"{admin.rstrip('/')}/health/ready", timeout=_HEALTH_S) as answer:
            said = json.load(answer)
    except urllib.error.HTTPError as error:
        said = {}
        with suppress(ValueError):
            said = json.load(error)
    except (OSError, ValueError) as error:
        fix = 'Its disk may hang: see `dmesg`, and "no port answers" in docs/operations.md.'
        yield Finding("server", Level.ERROR, f"pid {holder.pid} does not answer at {admin}: {error}", fix)
        return
    for level, member in ((Level.ERROR, "reasons"), (Level.WARNING, "warnings")):
        for name, text in said.get(member, {}).items():
            yield Finding("server", level, f"{name}: {text}", "See docs/operations.md.")
    if not said.get("reasons") and not said.get("warnings"):
        yield Finding("server", Level.OK, f"pid {holder.pid} is ready")


def queues(path: Path, holder: Holder | None) -> Iterator[Finding]:
    """Names, timeouts and damaged messages of all accounts."""
    if holder is None and not (path / "veilmq.db").exists():
        yield Finding("queues", Level.OK, "there are none yet")
        return
    with open_access(Target(None, None, path), {}) as access:
        found = list(access.queues("*", None, ""))
        yield from _names(found)
        wrong = list(_timeouts(access, found))
        yield from wrong
        if isinstance(access, DirectAccess) and (ahead_us := access.mark - SYSTEM.wall() * SECOND_US) > MINUTE_US:
            text = f"the data has seen a clock that was {duration(int(ahead_us))} ahead of this machine's"
            fix = "Set the machine's clock right; what it says then counts: veilmq clock accept"
            yield Finding("clock", Level.WARNING, text, fix)
        damaged = sum(1 for _ in access.quarantined("*", None, "", bodies=False))
    if damaged:
        fix = "veilmq quarantine list --all; docs/operations.md, A message is damaged"
        yield Finding("queues", Level.ERROR, f"{damaged} damaged messages are set apart", fix)
    elif not wrong:
        yield Finding("queues", Level.OK, f"{len(found)}, and no timeout that their history contradicts")


def _names(found: list[dict[str, Any]]) -> Iterator[Finding]:
    hidden = [
        each["name"]
        for each in found
        if not (each["settings"].get("alias") or is_alias(each["name"]))  # as Azure has them
        and not any(form.fullmatch(each["name"]) for form in (QUEUE_NAME, FIFO_QUEUE_NAME, NAME_WHOLE))
    ]
    if hidden:
        names = ", ".join(hidden[:_SHOWN]) + (f" and {len(hidden) - _SHOWN} more" if len(hidden) > _SHOWN else "")
        text = f"no protocol but veil:// can name {names}"
        yield Finding("queues", Level.WARNING, text, 'Give it an alias in a queues file: alias = "short-name".')


def _timeouts(access: AdminAccess, found: list[dict[str, Any]]) -> Iterator[Finding]:
    for account in sorted({each["account"] for each in found}):
        for each in access.wrong_timeouts({"account": account, "limit": 20, "look": True})["queues"]:
            best_us = each["recommended_us"] or each["at_least_us"]
            text = f"{each['name']}: a visibility timeout of {duration(each['timeout_us'])} is {each['wrong']}"
            text = f"{text.replace('_', ' ')}. {each['why']}"
            fix = "" if best_us is None else f"--visibility-timeout {max(1, round(best_us / SECOND_US))}s"
            yield Finding("queues", Level.WARNING, text, f"veilmq queues set {each['name']} {fix}" if fix else "")
