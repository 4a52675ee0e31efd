"""The doctor's checks: of the machine (versions, clock, open files, a way to its own ports, disk), and of what is
configured and what is in the data directory (owners and modes, credentials, certificate, queues).

Strategy: each check is a generator of findings; it reads /proc where Linux has no other call. Secrets are measured and
compared, never shown.
"""

import base64
import json
import os
import resource
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from statistics import median
from time import perf_counter
from typing import Any, Final
from urllib import request

import veilmq
from veilmq.cli.access import AdminAccess, Target, open_access
from veilmq.cli.access.direct import DirectAccess
from veilmq.cli.doctor import Finding, Level
from veilmq.cli.failures import MEMBER_FILE, check_directory, file_advice, refuse_remains
from veilmq.cli.output import duration, lease_change, lease_named, time_text
from veilmq.client.adapters.connect import DEVELOPMENT_KEYS
from veilmq.client.clock import SYSTEM
from veilmq.model.instant import MINUTE_US, SECOND_US
from veilmq.model.settings.queue import is_alias
from veilmq.model.wording import counted
from veilmq.protocols.mns.limits import NAME_WHOLE
from veilmq.protocols.sqs.limits import FIFO_QUEUE_NAME, QUEUE_NAME
from veilmq.server.auth import Account, Credentials
from veilmq.server.config import FileInvalid
from veilmq.server.config.settings import Settings
from veilmq.server.http.tls import load_pair
from veilmq.store import MIB
from veilmq.store.directory import Holder
from veilmq.store.files import REAL, sync_file

_SECRET_CHARACTERS_MIN: Final = 16
_WELL_KNOWN: Final = frozenset({"test", "secret", "password", "minioadmin", "localstack", "x", "any", "changeme"})
_PUBLIC: Final = frozenset(map(base64.b64decode, DEVELOPMENT_KEYS.values()))
"""Keys of Azure accounts that are printed in documentation."""
_ENDS_SOON_S: Final = 14 * 86_400
_SHOWN: Final = 5
_HEALTH_S: Final = 5
READ: Final = {
    "archive": 'docs/operations.md, "An archive"',
    "clock": 'docs/operations.md, "The clock"',
    "clock_step": 'docs/operations.md, "The clock"',
    "cluster": 'docs/cluster-runbooks.md, "A server is lost", and `veilmq cluster status`',
    "copy": 'docs/cluster.md, "What happens when"',
    "database": 'docs/operations.md, "A deleted file"',
    "disk": 'docs/operations.md, "The disk is full"',
    "pages": 'docs/operations.md, "Repair"',
    "pushes": 'docs/mns.md, "Pushes"',
    "single_copy": 'docs/cluster-runbooks.md, "The standby is lost"',
}
"""The page and the section about a reason or a warning of /health/ready."""
READ_OTHERWISE: Final = 'docs/operations.md, "It runs, but"'
TESTED: Final = ("3.11", "3.13", "3.14")
"""The Pythons of docs/releases.md that are tried."""
_SYNCS: Final = 9
_SYNC_BYTES: Final = 4_096
_SLOW_S: Final = 0.02
_VERY_SLOW_S: Final = 0.2
_LOW_TIMES: Final = 4
"""Less free space than so many times the floor is a warning."""
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_REMOTE: Final = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "gluster")
_THROUGH: Final = ("127.0.0.1", "localhost")


def versions(python: Sequence[int]) -> Iterator[Finding]:
    """Python, SQLite (inside apsw) and ours."""
    from veilmq.cli.release import sqlite_version

    text = f"VeilMQ {veilmq.__version__}, Python {'.'.join(map(str, python))}, SQLite {sqlite_version()}"
    if "{}.{}".format(*python) not in TESTED:
        fix = f"VeilMQ is tested with Python {', '.join(TESTED[:-1])} and {TESTED[-1]}: use one of these."
        yield Finding("versions", Level.WARNING, text, fix)
    else:
        yield Finding("versions", Level.OK, text)


def clock(*, synchronised: bool) -> Iterator[Finding]:
    """Whether a time service keeps the clock: leases do not depend on it, signatures and expiry do."""
    if synchronised:
        yield Finding("clock", Level.OK, "a time service keeps it")
        return
    text = "no time service keeps it: signed requests are refused and messages expire wrongly when it drifts"
    yield Finding("clock", Level.WARNING, text, "timedatectl set-ntp true, or run chrony; in a container, on its host.")


def open_files(limit: int, settings: Settings) -> Iterator[Finding]:
    """Whether full ports reach the limit."""
    needed = settings.files_needed
    text = (
        f"{'no limit' if limit == resource.RLIM_INFINITY else f'up to {limit}'}; a server with full ports has {needed}"
    )
    if limit != resource.RLIM_INFINITY and limit < needed:
        fix = f"LimitNOFILE={needed} in the unit, or ulimit -n {needed}, or a lower --connections-max."
        yield Finding("open files", Level.WARNING, text, fix)
    else:
        yield Finding("open files", Level.OK, text)


def open_files_limit(holder: Holder | None) -> int:
    """How many the running server may open, else this process: a server raises its own limit to the hard one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return hard if holder is None else _limit_of(holder.pid, hard)


def _limit_of(pid: int, otherwise: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    except OSError:
        return otherwise
    words = next((line.split() for line in lines if line.startswith("Max open files")), [])
    return int(words[4]) if len(words) > 4 and words[4].isdecimal() else otherwise


def proxies(environment: Mapping[str, str]) -> Iterator[Finding]:
    """SDKs send even requests to this machine to a proxy, unless they are told not to."""
    found = request.getproxies_environment()
    if not any(found.get(kind) for kind in ("http", "https", "all")):
        yield Finding("proxy", Level.OK, "none is set")
        return
    swallowed = [host for host in _THROUGH if not _passes_by(host, found)]
    if not swallowed:
        yield Finding("proxy", Level.OK, "one is set, and leaves out this machine")
        return
    names = sorted(name for name in environment if name.lower() in {"http_proxy", "https_proxy", "all_proxy"})
    text = f"{', '.join(names)}: SDKs send requests for {' and '.join(swallowed)} to that proxy"
    yield Finding("proxy", Level.WARNING, text, "export NO_PROXY=localhost,127.0.0.1 no_proxy=localhost,127.0.0.1")


def _passes_by(host: str, found: Mapping[str, str]) -> bool:
    """Whether requests for the host go around the proxy. typeshed does not know the function."""
    return bool(request.proxy_bypass_environment(host, found))  # type: ignore[attr-defined]


def space(directory: Path, free_bytes: int, floor_bytes: int) -> Iterator[Finding]:
    """Free space against the floor below which sends are refused, and the kind of file system."""
    text = f"{free_bytes // MIB} MiB free at {directory}; sends are refused below {floor_bytes // MIB}"
    if free_bytes < floor_bytes:
        yield Finding("disk", Level.ERROR, text, "Free some space, or give a lower --floor-bytes.")
    elif free_bytes < _LOW_TIMES * floor_bytes:
        yield Finding("disk", Level.WARNING, text, "Free some space, or give the data a disk of its own.")
    else:
        yield Finding("disk", Level.OK, text)
    kind = REAL.file_system(directory)
    if kind in _IN_MEMORY:
        text = f"{directory} is in memory ({kind}): everything is gone after a restart of the machine"
        yield Finding("disk", Level.WARNING, text, "Name a directory on a disk: --data DIR.")
    elif kind.startswith(_REMOTE):
        text = f"{directory} is on {kind}: a sync and a lock are as good as that server and its options"
        yield Finding("disk", Level.WARNING, text, "Use a local disk; for a second machine, docs/cluster.md.")


def sync_times(directory: Path) -> list[float]:
    """Seconds that a small write takes to be durable, several times."""
    path = directory / f".veilmq-doctor.{os.getpid()}"
    times = []
    try:
        for _ in range(_SYNCS):
            path.write_bytes(os.urandom(_SYNC_BYTES))
            begun = perf_counter()
            sync_file(path)
            times.append(perf_counter() - begun)
    finally:
        path.unlink(missing_ok=True)
    return times


def sync_speed(times: Sequence[float]) -> Iterator[Finding]:
    """Whether syncs are fast: nothing is answered before one. times: seconds of each."""
    middle = median(times)
    text = f"{time_text(middle)} (the longest of {len(times)}: {time_text(max(times))})"
    fix = "Use an SSD with power-loss protection, or a volume with more IOPS; nothing else should write to it."
    if middle > _VERY_SLOW_S:
        yield Finding("fsync", Level.ERROR, f"{text}: each request waits for one", fix)
    elif middle > _SLOW_S:
        yield Finding("fsync", Level.WARNING, f"{text}: each request waits for one", fix)
    else:
        yield Finding("fsync", Level.OK, text)


def holder_without_lock(path: Path) -> Holder | None:
    """Who holds the directory itself, as each owner does, though somebody deleted its file `lock`."""
    if not os.access(path, os.R_OK | os.X_OK):  # nor can this user see the lock
        return None
    with suppress(OSError):
        place = path.stat()
        wanted = f"{os.major(place.st_dev):02x}:{os.minor(place.st_dev):02x}:{place.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, mode, pid, inode, *_ = line.split()
            if (kind, mode, inode) == ("FLOCK", "WRITE", wanted):  # a repair only reads
                return Holder(int(pid))
    return None


def lock_deleted(path: Path, holder: Holder) -> Finding:
    """What to say of such a holder. A backup or a repair has only unfinished files there."""
    if all(".part" in each.name for each in path.iterdir()):
        text = f"pid {holder.pid} writes a backup or a repair into {path}"
        return Finding("directory", Level.WARNING, text, "Wait for it.")
    text = f"pid {holder.pid} holds {path}, but its file `lock` was deleted, so no command finds that server"
    fix = "Restart it: it makes the file again. Until then say where it is: --admin HOST:PORT."
    return Finding("directory", Level.ERROR, text, fix)


def directory(path: Path, holder: Holder | None) -> Iterator[Finding]:
    """Owner and mode of the data directory and of what is in it."""
    check_directory(path, "--data")
    if not path.is_dir():
        taken = Finding("directory", Level.ERROR, f"{path} is no directory", "Name another one with --data DIR.")
        free = Finding("directory", Level.OK, f"{path} is made at the first start")
        yield taken if path.exists() or path.is_symlink() else free
        return
    wrong = False
    status = path.stat()
    if status.st_mode & 0o077:
        wrong = True
        yield Finding("directory", Level.ERROR, f"{path} is open to other users", f"chmod 700 {quote(str(path))}")
    own, owner = os.geteuid(), status.st_uid
    others = sorted(each.name for each in path.iterdir() if each.lstat().st_uid != owner)
    if others or own not in (0, owner):
        wrong = True
        text = f"{path} belongs to uid {owner}" + (
            f", and {', '.join(others[:_SHOWN])} in it does not" if others else ""
        )
        fix = f"chown -R {owner if others else own} {quote(str(path))}" + ("" if others else f", or become uid {owner}")
        yield Finding("directory", Level.ERROR, text, fix)
    token = path / "admin-token"
    if token.exists() and token.stat().st_mode & 0o077:
        wrong = True
        yield Finding("directory", Level.ERROR, f"{token} is open to other users", f"chmod 600 {quote(str(token))}")
    if not wrong:
        state = "nobody holds it" if holder is None else f"held by pid {holder.pid}"
        yield Finding("directory", Level.OK, f"{path}: {state}")


def credentials(settings: Settings) -> Iterator[Finding]:
    """Whether keys are checked, and whether they can be guessed."""
    if settings.credentials is None:
        outside = [str(each) for each in settings.addresses().values() if not each.loopback]
        made = "veilmq keys new --into credentials.toml, then --credentials credentials.toml"
        none = "with these settings none are checked (development mode)"
        if outside:
            text = f"{none}, and {', '.join(outside)} can be reached from elsewhere"
            yield Finding("credentials", Level.WARNING, text, made)
        else:
            yield Finding("credentials", Level.OK, f"{none}: whoever is on this machine may do everything")
        return
    path = settings.credentials
    into = f"--into {quote(str(path))}"
    try:
        accounts = Credentials(path).accounts
    except FileInvalid as error:
        fix = file_advice(error, missing=f"veilmq keys new {into}", wrong="Mend it, and run this again.")
        yield Finding("credentials", Level.ERROR, str(error), fix)
        return
    new = f"veilmq keys new --account ID {into}, then take the old one out"
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
        fix = f"veilmq keys new {into}"
        yield Finding("credentials", Level.ERROR, f"{path} has no key: nobody gets in", fix)
    if not weak:
        keys = sum(len(account.keys) + len(account.azure_keys) for account in accounts)
        yield Finding("credentials", Level.OK, f"{counted(len(accounts), 'account')}, {counted(keys, 'key')}")


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
        load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), settings.tls_cert, settings.tls_key)
    except ssl.SSLError as error:
        fix = "--tls-cert takes a PEM chain, the server's own certificate first; --tls-key its key, unencrypted."
        yield Finding("certificate", Level.ERROR, str(error), fix)
        return
    from cryptography import x509

    try:
        end = x509.load_pem_x509_certificates(settings.tls_cert.read_bytes())[0].not_valid_after_utc
    except ValueError:  # such as BEGIN TRUSTED CERTIFICATE, which OpenSSL takes
        yield Finding("certificate", Level.OK, f"{settings.tls_cert} fits its key; its end cannot be read")
        return
    left_s = end.timestamp() - SYSTEM.wall()
    renew = "Put the new one in its place, and send SIGHUP to the server."
    text = f"{settings.tls_cert} is valid until {datetime.fromtimestamp(end.timestamp(), UTC):%Y-%m-%d %H:%M} UTC"
    if left_s < 0:
        yield Finding("certificate", Level.ERROR, f"{text}: clients refuse it", renew)
    elif left_s < _ENDS_SOON_S:
        yield Finding("certificate", Level.WARNING, f"{text}: {counted(int(left_s // 86_400), 'day')} left", renew)
    else:
        yield Finding("certificate", Level.OK, text)
    if settings.tls_key.stat().st_mode & 0o077:
        text = f"{settings.tls_key} can be read by other users"
        yield Finding("certificate", Level.WARNING, text, f"chmod 600 {quote(str(settings.tls_key))}")


def health(holder: Holder | None) -> Iterator[Finding]:
    """What the running server says of itself."""
    admin = None if holder is None else holder.url("admin")
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
        ready = urllib.request.Request(f"{admin.rstrip('/')}/health/ready", headers={"Host": "localhost"})
        with straight.open(ready, timeout=_HEALTH_S) as answer:
            said = json.load(answer)
    except urllib.error.HTTPError as error:
        said = {}
        with error, suppress(ValueError):
            said = json.load(error)
        if not isinstance(said, dict) or not said.get("reasons"):
            fix = "All connections of its admin port may be taken: see its log, and docs/operations.md."
            text = f"pid {holder.pid} does not say whether it is ready: {admin} answers {error.code} {error.reason}"
            yield Finding("server", Level.ERROR, text, fix)
            return
    except (OSError, ValueError) as error:
        fix = 'Its disk may hang: see `dmesg`, and "no port answers" in docs/operations.md.'
        yield Finding("server", Level.ERROR, f"pid {holder.pid} does not answer at {admin}: {error}", fix)
        return
    for level, member in ((Level.ERROR, "reasons"), (Level.WARNING, "warnings")):
        for name, text in said.get(member, {}).items():
            yield Finding("server", level, f"{name}: {text}", f"See {READ.get(name, READ_OTHERWISE)}.")
    if not said.get("reasons") and not said.get("warnings"):
        yield Finding("server", Level.OK, f"pid {holder.pid} is ready")


def queues(settings: Settings, holder: Holder | None) -> Iterator[Finding]:
    """Names, timeouts and damaged messages of all accounts. A copy that a server of a cluster keeps is opened by that
    server alone."""
    path = settings.data
    if holder is None and settings.cluster is not None and (path / MEMBER_FILE).exists():
        yield Finding("queues", Level.OK, f"{path} is a copy of the cluster's: start the server to have them looked at")
        return
    refuse_remains(path)
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
        yield Finding("queues", Level.ERROR, f"{counted(damaged, 'damaged message')} set apart", fix)
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
            text = f"{each['name']}: a {lease_named(each['by'], each['lease_us'])} is {each['wrong'].replace('_', ' ')}"
            fix = lease_change(each["name"], each["by"], best_us)
            yield Finding("queues", Level.WARNING, f"{text}. {each['why']}", fix)
