"""Stored access policies of a queue: read from XML, written to XML, and stored as a label.

Strategy: a queue's policies are one label, in JSON. Times are stored as the client wrote them, because Get Queue ACL
returns that text. Source: "Set Queue ACL".
"""

from typing import Final

import msgspec

from veilmq.protocols.azure import limits
from veilmq.protocols.azure.errors import bad_xml, missing_node
from veilmq.protocols.azure.instants import read_policy_time
from veilmq.protocols.azure.xml_reading import members_of, only, read_document
from veilmq.protocols.azure.xml_writing import DECLARATION
from veilmq.protocols.xml import Element, escape

LABEL: Final = "azure.policies"
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
    text = labels.get(LABEL)
    return _DECODER.decode(text) if text else ()


def label_of(policies: tuple[Policy, ...]) -> dict[str, str]:
    """The labels that store exactly these policies."""
    return {LABEL: msgspec.json.encode(policies).decode() if policies else ""}


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
    members = (("Start", policy.start), ("Expiry", policy.expiry), ("Permission", policy.permission))
    fields = "".join(f"<{name}>{escape(text)}</{name}>" for name, text in members if text is not None)
    access = f"<AccessPolicy>{fields}</AccessPolicy>" if fields else "<AccessPolicy/>"
    return f"<SignedIdentifier><Id>{escape(policy.id)}</Id>{access}</SignedIdentifier>"
