"""The operations of Queue Storage: here one row each, and the look-up of a request's operation; by noun in the files
beside this one, which turn requests into commands, and outcomes into responses.

Strategy: a new operation is a pair of functions and a row here. The kind of path, `restype` and `comp` select a small
table from method to row. A method that is not in it is refused as a method, a `comp` without a table as a value. The
letters are those of "Create an account SAS" and "Create a service SAS": sufficient resource types and permissions.
"""

from typing import Final

from veilmq.protocols.azure import errors, limits
from veilmq.protocols.azure.addresses import Kind
from veilmq.protocols.azure.call import Asked, Operation, answer_nothing
from veilmq.protocols.azure.errors import Refusal, bad_parameter, missing_parameter
from veilmq.protocols.azure.operations import messages, queues, service

_GET_METADATA: Final = Operation(
    "Get Queue Metadata", queues.plan_describe, queues.answer_metadata, "c", "r", "r", writes=False
)
_GET_ACL: Final = Operation(
    "Get Queue ACL",
    queues.plan_describe,
    queues.answer_acl,
    writes=False,
    since=limits.VERSION_SAS_OLDEST,
    bearer_since=limits.VERSION_BEARER_ACL,
)

SET_PROPERTIES: Final = Operation(
    "Set Queue Service Properties", service.plan_set_properties, service.answer_accepted, "s", "w"
)

_PUT: Final = Operation("Put Message", messages.plan_put, messages.answer_put, "o", "a", "a")
_GET: Final = Operation("Get Messages", messages.plan_get, messages.answer_messages, "o", "p", "p")
_CLEAR: Final = Operation("Clear Messages", messages.plan_clear, answer_nothing, "o", "d")
_PEEK: Final = Operation("Peek Messages", messages.plan_peek, messages.answer_messages, "o", "r", "r", writes=False)

TABLE: Final[dict[tuple[Kind, str, str], dict[str, Operation]]] = {
    (Kind.SERVICE, "", "list"): {
        "GET": Operation("List Queues", queues.plan_list, queues.answer_list, "s", "l", writes=False),
    },
    (Kind.SERVICE, "service", "properties"): {
        "GET": Operation(
            "Get Queue Service Properties",
            service.plan_get_properties,
            service.answer_properties,
            "s",
            "r",
            writes=False,
        ),
        "PUT": SET_PROPERTIES,
    },
    (Kind.SERVICE, "service", "stats"): {
        "GET": Operation(
            "Get Queue Service Stats",
            service.plan_stats,
            service.answer_stats,
            "s",
            "r",
            writes=False,
            since=limits.VERSION_CORS,
        ),
    },
    (Kind.SERVICE, "service", "userdelegationkey"): {
        "POST": Operation(
            "Get User Delegation Key",
            service.plan_delegation_key,
            service.answer_delegation_key,
            since=limits.VERSION_DELEGATION,
            only_bearer=True,
        ),
    },
    (Kind.QUEUE, "", ""): {
        "PUT": Operation("Create Queue", queues.plan_create, queues.answer_create, "c", "cw"),
        "DELETE": Operation("Delete Queue", queues.plan_delete, answer_nothing, "c", "d"),
    },
    (Kind.QUEUE, "", "metadata"): {
        "GET": _GET_METADATA,
        "HEAD": _GET_METADATA,
        "PUT": Operation("Set Queue Metadata", queues.plan_set_metadata, answer_nothing, "c", "w"),
    },
    (Kind.QUEUE, "", "acl"): {
        "GET": _GET_ACL,
        "HEAD": _GET_ACL,
        "PUT": Operation(
            "Set Queue ACL",
            queues.plan_set_acl,
            answer_nothing,
            since=limits.VERSION_SAS_OLDEST,
            bearer_since=limits.VERSION_BEARER_ACL,
        ),
    },
    (Kind.MESSAGES, "", ""): {
        "POST": _PUT,
        "GET": _GET,
        # "A service SAS can't grant access to certain operations": queues can't be cleared.
        "DELETE": _CLEAR,
    },
    (Kind.MESSAGE, "", ""): {
        "DELETE": Operation("Delete Message", messages.plan_delete, answer_nothing, "o", "p", "p"),
        "PUT": Operation(
            "Update Message",
            messages.plan_update,
            messages.answer_update,
            "o",
            "u",
            "u",
            since=limits.VERSION_UPDATE,
        ),
    },
}
OPERATIONS: Final = {row.name: row for rows in (*TABLE.values(), {"": _PEEK}) for row in rows.values()}
_COMPS: Final = {kind: {comp for each, _, comp in TABLE if each is kind} for kind in Kind}


def find(asked: Asked) -> Operation:
    """The row of the operation that a request names. Raises Refusal."""
    parameters, kind, method = asked.parameters, asked.place.kind, asked.request.method
    restype, comp = parameters.get("restype", "").lower(), parameters.get("comp", "").lower()
    rows = TABLE.get((kind, restype, comp))
    if rows is None:
        raise _unknown(asked, kind, comp)
    row = rows.get(method)
    if row is None:
        allow = ((b"allow", ",".join(rows).encode()),)
        raise Refusal(errors.UNSUPPORTED_HTTP_VERB, headers=allow)
    if row is _GET and "peekonly" in parameters:
        row = _peek_or_get(parameters["peekonly"])
    if row is _CLEAR and "popreceipt" in parameters:  # a Delete Message with an empty id, which clients do send
        raise bad_parameter("popreceipt", parameters["popreceipt"], "Clear Messages takes none: name a message's id.")
    if asked.version < row.since:
        raise Refusal(errors.FEATURE_VERSION_MISMATCH, {"Reason": f"{row.name} needs version {row.since} or later."})
    return row


def _peek_or_get(text: str) -> Operation:
    if text.lower() not in {"true", "false"}:
        raise bad_parameter("peekonly", text, "Not true or false.")
    return _PEEK if text.lower() == "true" else _GET


def _unknown(asked: Asked, kind: Kind, comp: str) -> Refusal:
    if comp in _COMPS[kind]:
        if comp or "restype" in asked.parameters:
            given = asked.parameters.get("restype", "")
            return bad_parameter("restype", given, "Not a resource type of this operation.")
        return missing_parameter("comp")
    if not comp:
        return missing_parameter("comp")
    return bad_parameter("comp", asked.parameters["comp"], "Not an operation on this resource.")
