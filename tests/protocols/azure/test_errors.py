"""Every error of the house has an answer, and every answer its code, message and headers."""

from typing import Any

from tests.protocols.azure.conftest import VERSION

from veilmq.model.commands import Delete, Origin
from veilmq.model.errors import VeilError, leaves
from veilmq.model.instant import Instant
from veilmq.model.settings.queue import QueueKey
from veilmq.protocols import Response
from veilmq.protocols.azure import errors
from veilmq.protocols.azure.errors import Fault, fault_of
from veilmq.protocols.azure.operations import OPERATIONS, TABLE
from veilmq.server.http import Answers
from veilmq.testing.for_each import for_each

COMMAND = Delete(
    queue=QueueKey("1", "r", "q"), origin=Origin("azure", "p"), handle="00" * 33, arrived=Instant(0), message_id=b""
)
FAULTS = {name: value for name, value in vars(errors).items() if isinstance(value, Fault)}


@for_each("leaf", list(leaves()), ids=lambda leaf: leaf.__name__)
def test_the_table_is_total(leaf: type[VeilError]) -> None:
    refusal = fault_of(leaf(**dict.fromkeys(leaf.fields, 1)), COMMAND)
    assert refusal.fault in FAULTS.values()
    assert refusal.fault.status >= 400


def test_faults_are_named_as_their_codes() -> None:
    for name, fault in FAULTS.items():
        words = "".join(part.title() for part in name.split("_"))
        assert fault.code.lower() == words.lower() or fault is errors.INVALID_TOKEN, name
        assert fault.message.isascii()
        assert fault.message.isprintable()
        assert fault.message.endswith(".")


@for_each(
    ("fault", "words"),
    [
        # Azure/azure-sdk-for-java #15008, Azure/azure-kusto-node #218, Azure/azure-functions-host #8412
        (
            errors.AUTHENTICATION_FAILED,
            "Server failed to authenticate the request. Make sure the value of Authorization header is formed "
            "correctly including the signature.",
        ),
        # Azure/azure-sdk-for-python #28984, Particular/docs.particular.net #4653
        (errors.INVALID_RESOURCE_NAME, "The specifed resource name contains invalid characters."),
        # Azure/azure-storage-node #295
        (errors.INVALID_URI, "The requested URI does not represent any resource on the server."),
        # Azure/azure-storage-python #300, Azure/azure-sdk-for-net #44848
        (errors.MESSAGE_NOT_FOUND, "The specified message does not exist."),
        # Azure/azure-sdk-for-python #28984
        (errors.QUEUE_BEING_DELETED, "The specified queue is being deleted."),
        # squigg/azure-queue-laravel #6, DataBiosphere/toil #381
        (errors.OPERATION_TIMED_OUT, "Operation could not be completed within the specified time."),
        # Azure/azure-sdk-for-java #40920
        (
            errors.INVALID_TOKEN,
            "Server failed to authenticate the request. Please refer to the information in the "
            "www-authenticate header.",
        ),
    ],
)
def test_the_words_are_those_that_the_service_sent(fault: Fault, words: str) -> None:
    """Programs search for them, so they are not corrected."""
    assert fault.message == words


def test_every_operation_is_a_row_with_documented_letters() -> None:
    letters = {
        name: (row.account_types, row.account_permissions, row.queue_permissions) for name, row in OPERATIONS.items()
    }
    assert letters == {
        "List Queues": ("s", "l", ""),
        "Get Queue Service Properties": ("s", "r", ""),
        "Set Queue Service Properties": ("s", "w", ""),
        "Get Queue Service Stats": ("s", "r", ""),
        "Get User Delegation Key": ("", "", ""),
        "Create Queue": ("c", "cw", ""),
        "Delete Queue": ("c", "d", ""),
        "Get Queue Metadata": ("c", "r", "r"),
        "Set Queue Metadata": ("c", "w", ""),
        "Get Queue ACL": ("", "", ""),
        "Set Queue ACL": ("", "", ""),
        "Put Message": ("o", "a", "a"),
        "Get Messages": ("o", "p", "p"),
        "Peek Messages": ("o", "r", "r"),
        "Delete Message": ("o", "p", "p"),
        "Clear Messages": ("o", "d", ""),
        "Update Message": ("o", "u", "u"),
    }


def test_an_error_says_who_and_when(wire: Any) -> None:
    answer = wire.ask("GET", "/none?comp=metadata", headers={"x-ms-client-request-id": "mine"})
    assert answer.code == "QueueNotFound"
    first, second, third = answer.text("Message").split("\n")
    assert first == "The specified queue does not exist."
    assert second == f"RequestId:{answer.headers['x-ms-request-id']}"
    assert third.startswith(f"Time:{wire.iso()[:-1]}.")
    assert answer.headers["x-ms-version"] == "2026-10-06"
    assert answer.headers["x-ms-client-request-id"] == "mine"
    assert answer.response.content_type == b"application/xml"
    assert answer.response.phrase == first.encode()
    listener = Answers()
    lines = [listener.write(Response(404, None, b"", phrase=each), 0).partition(b"\r")[0] for each in (b"A", b"B", b"")]
    assert lines == [b"HTTP/1.1 404 A", b"HTTP/1.1 404 B", b"HTTP/1.1 404 Not Found"]


def test_a_client_request_id_comes_back_if_it_is_short(wire: Any) -> None:
    for length, back in ((1_024, True), (1_025, False)):
        answer = wire.ask("GET", "/?comp=list", headers={"x-ms-client-request-id": "x" * length})
        assert answer.status == 200
        assert ("x-ms-client-request-id" in answer.headers) is back


@for_each("version", ["2009-09-19", "2026-10-06", "2031-12-31", "9999-01-01"])
def test_any_well_formed_version_is_taken(wire: Any, version: str) -> None:
    answer = wire.ask("GET", "/?comp=list", version=version)
    assert answer.status == 200
    assert answer.headers["x-ms-version"] == version


@for_each("version", ["", "latest", "2026-13-01", "2026-1-1", "2026-10-06 ", "20261006", "2026-10-06-preview"])
def test_a_malformed_version_is_not(wire: Any, version: str) -> None:
    refused = wire.ask("GET", "/?comp=list", version=version)
    assert (refused.status, refused.code) == (400, "InvalidHeaderValue")
    assert refused.text("HeaderName") == "x-ms-version"
    assert "x-ms-version" not in refused.headers


def test_without_a_version(wire: Any) -> None:
    refused = wire.ask("GET", "/?comp=list", version=None)
    assert (refused.code, refused.text("HeaderName")) == ("MissingRequiredHeader", "x-ms-version")
    sas = wire.account_sas()
    assert wire.ask("GET", f"/?comp=list&{sas}", auth=None, version=None).headers["x-ms-version"] == "2026-10-06"


def test_a_refusal_without_its_body_has_no_content_type(wire: Any) -> None:
    """The C++ SDK parses what the Content-Type says is XML, and crashes: floci-az #184."""
    refused = wire.ask("HEAD", "/none?comp=metadata")
    assert (refused.status, refused.headers["x-ms-error-code"]) == (404, "QueueNotFound")
    assert refused.response.content_type is None


VERBS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH")
PATHS = {1: "/", 2: "/orders", 3: "/orders/messages", 4: "/orders/messages/11111111-2222-3333-4444-555555555555"}


@for_each("verb", VERBS)
def test_wrong_verbs(wire: Any, verb: str) -> None:
    for (kind, restype, comp), rows in TABLE.items():
        query = "&".join(f"{name}={value}" for name, value in (("restype", restype), ("comp", comp)) if value)
        answer = wire.ask(verb, f"{PATHS[kind]}?{query}" if query else PATHS[kind])
        if verb in rows:
            assert answer.code != "UnsupportedHttpVerb"
        else:
            assert (answer.status, answer.code) == (405, "UnsupportedHttpVerb")
            assert set(answer.headers["allow"].split(",")) == set(rows)


@for_each(
    ("target", "code", "name"),
    [
        ("/?comp=nothing", "InvalidQueryParameterValue", "comp"),
        ("/", "MissingRequiredQueryParameter", "comp"),
        ("/?restype=service", "MissingRequiredQueryParameter", "comp"),
        ("/?restype=account&comp=properties", "InvalidQueryParameterValue", "restype"),
        ("/?comp=properties", "InvalidQueryParameterValue", "restype"),
        ("/orders?comp=list", "InvalidQueryParameterValue", "comp"),
        ("/orders/messages?comp=metadata", "InvalidQueryParameterValue", "comp"),
        ("/orders/messages?peekonly=maybe", "InvalidQueryParameterValue", "peekonly"),
        ("/orders/messages?comp=a&comp=b", "InvalidQueryParameterValue", "comp"),
    ],
)
def test_unknown_operations(wire: Any, target: str, code: str, name: str) -> None:
    refused = wire.ask("GET", target)
    assert (refused.status, refused.code, refused.text("QueryParameterName")) == (400, code, name)
    assert refused.headers["x-ms-version"] == VERSION


def test_names_of_parameters_have_no_case(wire: Any) -> None:
    queue = wire.queue()
    for _ in range(3):
        wire.put(queue)
    assert len(wire.get(queue, "?NumOfMessages=3").texts("QueueMessage")) == 3


@for_each("status", [400, 403, 405, 408, 413, 414, 417, 431, 500, 501, 503, 418, 599])
def test_what_the_listener_refuses_has_a_code_too(wire: Any, status: int) -> None:
    answer = wire.read(wire.codec.refuse(status, "It is so.", None, "the-id"))
    assert answer.status == status
    assert answer.code
    assert answer.text("Message") == "It is so.\nRequestId:the-id"
    again = wire.read(wire.codec.refuse(status, "It is so.", wire.request("GET", "/")))
    assert (again.status, again.code) == (status, answer.code)


def test_a_failure_is_an_internal_error(wire: Any) -> None:
    answer = wire.read(wire.codec.failure(wire.request("GET", "/")))
    assert (answer.status, answer.code) == (500, "InternalError")
