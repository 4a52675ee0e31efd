"""Shared access signatures (account SAS, queue SAS, user delegation SAS), and a queue's stored access policies.

Strategy: the signature is checked first, over the parameters as they are in the URL. A valid SAS is cached by all its
parameters, so that the same token costs no second HMAC and strangers fill no memory. Then times, address and protocol
are checked. The operation compares permissions, and the fields of a stored policy are merged in once the queue is
known. A user delegation key is derived from the account's key and all fields signed with it, so none needs to be
stored, and a new account key revokes them all.

A queue's policies are one label, in JSON. Times are stored as the client wrote them, and Get Queue ACL writes them all
in one form. Source: "Create an account SAS", "Create a service SAS", "Create a user delegation SAS", "Set Queue ACL".
"""

import hmac
from hashlib import sha256
from ipaddress import AddressValueError, IPv4Address
from typing import Final

import msgspec

from veilmq.model.instant import SECOND_US, Instant
from veilmq.model.settings.access import NamedAccount
from veilmq.protocols import Element, Request, escape, is_secure, show, source_address
from veilmq.protocols.azure import errors, limits
from veilmq.protocols.azure.addresses import Endpoint, Kind, Place
from veilmq.protocols.azure.auth.shared_key import matches, read_signature
from veilmq.protocols.azure.call import Identity, Sas, Way
from veilmq.protocols.azure.errors import Refusal, bad_xml, missing_node, unauthenticated
from veilmq.protocols.azure.fields import (
    DECLARATION,
    members_of,
    only,
    print_policy_time,
    print_rfc1123,
    read_document,
    read_iso,
    read_policy_time,
)

_LABEL: Final = "azure.policies"
PERMISSIONS: Final = "raup"
"""What a queue's SAS and its policies can permit: read, add, update, process."""


class Policy(msgspec.Struct, frozen=True, omit_defaults=True):
    """One SignedIdentifier. Fields of None are left to the SAS."""

    id: str
    start: str | None = None
    expiry: str | None = None
    permission: str | None = None


_DECODER: Final = msgspec.json.Decoder(tuple[Policy, ...])


def policies_of(labels: dict[str, str]) -> tuple[Policy, ...]:
    """The policies in a queue's labels."""
    text = labels.get(_LABEL)
    return _DECODER.decode(text) if text else ()


def policies_label(policies: tuple[Policy, ...]) -> dict[str, str]:
    """The labels that store exactly these policies."""
    return {_LABEL: msgspec.json.encode(policies).decode() if policies else ""}


def read_policies(body: bytes) -> tuple[Policy, ...]:
    """The policies of a Set Queue ACL request; no body means none. Raises Refusal."""
    if not body:
        return ()
    root = read_document(body, "SignedIdentifiers", limits.DOCUMENT_BYTES_MAX)
    policies = tuple(_policy(node) for node in only(root, "SignedIdentifier"))
    if len(policies) > limits.POLICIES_MAX:
        raise bad_xml(f"A queue has at most {limits.POLICIES_MAX} access policies.")
    if len({policy.id for policy in policies}) != len(policies):
        raise bad_xml("Two access policies have the same Id.")
    return policies


def _policy(node: Element) -> Policy:
    known = members_of(node, ("Id", "AccessPolicy"))
    identifier = known.get("Id")
    if identifier is None or not identifier.text:
        raise missing_node("Id")
    if len(identifier.text) > limits.POLICY_ID_CHARACTERS_MAX:
        raise bad_xml(f"An Id has at most {limits.POLICY_ID_CHARACTERS_MAX} characters.")
    access = known.get("AccessPolicy")
    if access is None:
        return Policy(identifier.text)
    fields = {name: member.text for name, member in members_of(access, ("Start", "Expiry", "Permission")).items()}
    for name in ("Start", "Expiry"):
        if fields.get(name) and read_policy_time(fields[name]) is None:
            raise bad_xml(f"{name} is not a time in UTC in the form of ISO 8601, its fraction of seven digits.")
    permission = fields.get("Permission") or None
    if permission is not None and "".join(letter for letter in PERMISSIONS if letter in permission) != permission:
        raise bad_xml(f"Permission has letters of {PERMISSIONS}, in this order and each once.")
    return Policy(identifier.text, fields.get("Start") or None, fields.get("Expiry") or None, permission)


def write_policies(policies: tuple[Policy, ...]) -> bytes:
    """The body of Get Queue ACL."""
    return f"{DECLARATION}<SignedIdentifiers>{''.join(map(_written, policies))}</SignedIdentifiers>".encode()


def _written(policy: Policy) -> str:
    start, expiry = (text and print_policy_time(text) for text in (policy.start, policy.expiry))
    members = (("Start", start), ("Expiry", expiry), ("Permission", policy.permission))
    fields = "".join(f"<{name}>{escape(text)}</{name}>" for name, text in members if text is not None)
    access = f"<AccessPolicy>{fields}</AccessPolicy>" if fields else "<AccessPolicy/>"
    return f"<SignedIdentifier><Id>{escape(policy.id)}</Id>{access}</SignedIdentifier>"


_KNOWN_MAX: Final = 1_024
_NAMES: Final = (
    "sig", "sp", "ss", "srt", "st", "se", "sip", "spr", "sv", "ses", "si",
    "skoid", "sktid", "skt", "ske", "sks", "skv", "skdutid", "sduoid",
)  # fmt: skip
_PROTOCOLS: Final = {"https": True, "https,http": False, "http,https": False}
_SERVICE: Final = "q"


def delegation_value(secret: bytes, fields: tuple[str, ...]) -> bytes:
    """The key for these fields: object id, tenant, start, expiry, service, version, delegated tenant."""
    return hmac.digest(secret, "\n".join(("veilmq user delegation key", *fields)).encode(), sha256)


class SasReader:
    """Reads and checks signatures of one listener."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._known: dict[tuple[object, ...], tuple[NamedAccount, Sas]] = {}

    def read(self, parameters: dict[str, str], place: Place, account: NamedAccount | None) -> Sas:
        """Read the SAS in a query and check its signature. Raises Refusal."""
        given = tuple([parameters.get(name) for name in _NAMES])
        known = self._known.get((place.account, place.queue, given))
        if known is not None and known[0] is account:
            return known[1]
        sas = _read(parameters, place, account)
        assert account is not None
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        self._known[place.account, place.queue, given] = (account, sas)
        return sas

    def check(self, sas: Sas, request: Request, wall: Instant, identity: Identity | None) -> None:
        """Raises Refusal if the SAS is not valid now, from that address or over that protocol."""
        if sas.policy is None:
            check_times(sas.start, sas.expiry, wall)
        if sas.address is not None and not _within(sas.address, source_address(request, self._endpoint.trusted_proxy)):
            source = {"SourceIP": show(source_address(request, self._endpoint.trusted_proxy))}
            raise Refusal(errors.AUTHORIZATION_SOURCE_IP_MISMATCH, source)
        if sas.https_only and not is_secure(request, self._endpoint.trusted_proxy):
            raise Refusal(errors.AUTHORIZATION_PROTOCOL_MISMATCH)
        if _SERVICE not in sas.services:
            raise Refusal(errors.AUTHORIZATION_SERVICE_MISMATCH)
        if sas.delegated_to is not None and (
            identity is None
            or identity.object_id != sas.delegated_to
            or (sas.delegated_tenant is not None and identity.tenant != sas.delegated_tenant)
        ):
            raise unauthenticated("A bearer token of the user named in sduoid must come with this SAS.")


def with_policy(sas: Sas, policies: tuple[Policy, ...], wall: Instant) -> Sas:
    """The SAS completed by its stored policy. Raises Refusal: unknown policy, or a field given in both."""
    for policy in policies:
        if policy.id != sas.policy:
            continue
        for own, stored in (
            (sas.permissions, policy.permission),
            (sas.start, policy.start),
            (sas.expiry, policy.expiry),
        ):
            if own is not None and stored is not None:
                detail = "Access policy fields can be associated with signature or SAS identifier but not both."
                raise unauthenticated(detail)
        # Times stored by an earlier release may have an offset or a shorter fraction, and still apply.
        start = read_iso(policy.start) if policy.start else sas.start
        expiry = read_iso(policy.expiry) if policy.expiry else sas.expiry
        permissions = sas.permissions if policy.permission is None else policy.permission
        if expiry is None or permissions is None:
            lacking = "se" if expiry is None else "sp"
            raise unauthenticated(f"{lacking} is mandatory: neither the SAS nor its access policy has it.")
        check_times(start, expiry, wall)
        return msgspec.structs.replace(sas, start=start, expiry=expiry, permissions=permissions)
    raise unauthenticated("The access policy that si names does not exist.")


def check_times(start: Instant | None, expiry: Instant | None, wall: Instant) -> None:
    """Raises Refusal before the start and from the expiry on."""
    if (start is not None and wall < start) or (expiry is not None and wall >= expiry):
        begins = "" if start is None else print_rfc1123(start)
        ends = "" if expiry is None else print_rfc1123(expiry)
        detail = "Signature not valid in the specified time frame"
        raise unauthenticated(f"{detail}: Start [{begins}] - Expiry [{ends}] - Current [{print_rfc1123(wall)}]")


def check_permission(sas: Sas, account_types: str, account_permissions: str, queue_permissions: str) -> None:
    """Raises Refusal if the SAS does not cover the operation of these letters. Empty: no SAS does."""
    if sas.way is Way.ACCOUNT_SAS:
        if not account_permissions:
            raise Refusal(errors.AUTHORIZATION_FAILURE)
        if not any(each in sas.resource_types for each in account_types):
            raise Refusal(errors.AUTHORIZATION_RESOURCE_TYPE_MISMATCH)
        wanted = account_permissions
    else:
        if not queue_permissions:
            raise Refusal(errors.AUTHORIZATION_FAILURE)
        wanted = queue_permissions
    if not any(each in (sas.permissions or "") for each in wanted):
        raise Refusal(errors.AUTHORIZATION_PERMISSION_MISMATCH)


def _read(parameters: dict[str, str], place: Place, account: NamedAccount | None) -> Sas:
    version = parameters.get("sv", "")
    if not limits.VERSION.match(version) or version < limits.VERSION_SAS_OLDEST:
        raise unauthenticated("sv is missing or not a version of the service.")
    if "skoid" in parameters:
        return _delegation_sas(parameters, place, account, version)
    if "ss" in parameters or "srt" in parameters:
        return _account_sas(parameters, place, account, version)
    return _queue_sas(parameters, place, account, version)


def _check_signature(parameters: dict[str, str], secrets: tuple[bytes, ...], text: str, known: bool) -> None:
    given = read_signature(parameters.get("sig", "").encode())
    if not matches(secrets, text.encode(), given) or not known:  # the same text, so that a stranger learns nothing
        raise unauthenticated(f"Signature did not match. String to sign used was {text}")


def _secrets(account: NamedAccount | None) -> tuple[bytes, ...]:
    return (b"",) if account is None else account.secrets


def _account_sas(parameters: dict[str, str], place: Place, account: NamedAccount | None, version: str) -> Sas:
    if version < limits.VERSION_SAS_ADDRESSES:
        raise unauthenticated(f"Account SAS needs version {limits.VERSION_SAS_ADDRESSES} or later.")
    for name in ("sp", "se", "ss", "srt"):
        if not parameters.get(name):
            raise unauthenticated(f"{name} is mandatory. Cannot be empty")
    names = ["sp", "ss", "srt", "st", "se", "sip", "spr", "sv"]
    if version >= limits.VERSION_SAS_SCOPE:
        names.append("ses")
    text = "".join(f"{each}\n" for each in (place.account, *(parameters.get(each, "") for each in names)))
    _check_signature(parameters, _secrets(account), text, account is not None)
    assert account is not None
    _check_letters("ss", parameters["ss"], "bqtf")
    _check_letters("srt", parameters["srt"], "sco")
    return Sas(
        Way.ACCOUNT_SAS,
        account.key,
        parameters["sp"],
        _time(parameters, "st"),
        _time(parameters, "se"),
        None,
        _address(parameters),
        _https_only(parameters),
        parameters["srt"],
        parameters["ss"],
    )


def _queue_sas(parameters: dict[str, str], place: Place, account: NamedAccount | None, version: str) -> Sas:
    if place.kind is Kind.SERVICE:
        raise unauthenticated("A queue's SAS does not authorise requests to the service.")
    policy = parameters.get("si") or None
    if policy is None:
        for name in ("sp", "se"):
            if not parameters.get(name):
                raise unauthenticated(f"{name} is mandatory. Cannot be empty")
    _check_order(parameters)
    resource = f"/{place.account}/{place.queue}"
    if version >= limits.VERSION_EMPTY_LENGTH:
        resource = f"/queue{resource}"
    lines = [parameters.get("sp", ""), parameters.get("st", ""), parameters.get("se", ""), resource, policy or ""]
    if version >= limits.VERSION_SAS_ADDRESSES:
        lines += [parameters.get("sip", ""), parameters.get("spr", "")]
    _check_signature(parameters, _secrets(account), "\n".join([*lines, version]), account is not None)
    assert account is not None
    return Sas(
        Way.QUEUE_SAS,
        account.key,
        parameters.get("sp") or None,
        _time(parameters, "st"),
        _time(parameters, "se"),
        policy,
        _address(parameters),
        _https_only(parameters),
    )


def _delegation_sas(parameters: dict[str, str], place: Place, account: NamedAccount | None, version: str) -> Sas:
    if version < limits.VERSION_DELEGATION:
        raise unauthenticated(f"User delegation SAS for queues needs version {limits.VERSION_DELEGATION} or later.")
    if place.kind is Kind.SERVICE:
        raise unauthenticated("A queue's SAS does not authorise requests to the service.")
    for name in ("sp", "se", "skoid", "sktid", "skt", "ske", "sks", "skv"):
        if not parameters.get(name):
            raise unauthenticated(f"{name} is mandatory. Cannot be empty")
    _check_order(parameters)
    get = parameters.get
    fields = tuple(get(each, "") for each in ("skoid", "sktid", "skt", "ske", "sks", "skv", "skdutid"))
    lines = [
        get("sp", ""), get("st", ""), get("se", ""), f"/queue/{place.account}/{place.queue}", *fields,
        get("sduoid", ""), get("sip", ""), get("spr", ""), version,
    ]  # fmt: skip
    keys = tuple(delegation_value(secret, fields) for secret in _secrets(account))
    _check_signature(parameters, keys, "\n".join(lines), account is not None)
    assert account is not None
    identity = account.identity(get("skoid", ""))
    if identity is None:
        raise Refusal(errors.AUTHORIZATION_PERMISSION_MISMATCH)
    start, expiry = _time(parameters, "st"), _time(parameters, "se")
    key_start, key_expiry = _time(parameters, "skt"), _time(parameters, "ske")
    assert expiry is not None
    assert key_start is not None
    assert key_expiry is not None
    return Sas(
        Way.DELEGATION_SAS,
        identity,
        get("sp"),
        max(start, key_start) if start is not None else key_start,
        min(expiry, key_expiry, Instant(key_start + limits.DELEGATION_SECONDS_MAX * SECOND_US)),
        None,
        _address(parameters),
        _https_only(parameters),
        delegated_to=get("sduoid") or None,
        delegated_tenant=get("skdutid") or None,
    )


def _check_order(parameters: dict[str, str]) -> None:
    """Check that the letters of a queue's SAS are in order, each at most once."""
    letters = parameters.get("sp", "")
    if "".join(letter for letter in PERMISSIONS if letter in letters) != letters:
        raise unauthenticated(f"sp has letters of {PERMISSIONS}, in this order and each once: '{show(letters)}'.")


def _check_letters(name: str, text: str, allowed: str) -> None:
    if any(letter not in allowed for letter in text):
        raise unauthenticated(f"{name} has a letter other than {allowed}.")


def _time(parameters: dict[str, str], name: str) -> Instant | None:
    text = parameters.get(name)
    if not text:
        return None
    instant = read_iso(text)
    if instant is None:
        raise unauthenticated(f"{name} is not a time in the form of ISO 8601: '{show(text)}'.")
    return instant


def _https_only(parameters: dict[str, str]) -> bool:
    text = parameters.get("spr")
    if not text:
        return False
    if text not in _PROTOCOLS:
        raise unauthenticated(f"spr is neither https nor https,http: '{show(text)}'.")
    return _PROTOCOLS[text]


def _address(parameters: dict[str, str]) -> tuple[int, int] | None:
    text = parameters.get("sip")
    if not text:
        return None
    first, _, last = text.partition("-")
    try:
        low, high = int(IPv4Address(first)), int(IPv4Address(last or first))
    except AddressValueError:
        raise unauthenticated(f"sip is no IPv4 address or range of them: '{show(text)}'.") from None
    if low > high:
        raise unauthenticated(f"sip is a range that ends before it begins: '{show(text)}'.")
    return low, high


def _within(range_: tuple[int, int], peer: str) -> bool:
    try:
        address = int(IPv4Address(peer.removeprefix("::ffff:")))
    except AddressValueError:
        return False
    return range_[0] <= address <= range_[1]
