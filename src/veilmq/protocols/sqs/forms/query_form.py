"""The Query form: reads parameters of a form body or query string, writes XML.

Strategy: names such as `SendMessageBatchRequestEntry.2.MessageAttribute.1.Value.DataType` are folded into the tree that
the JSON form would send, by one table of the lists and maps that the service model flattens; msgspec converts it to the
operation's input.

A response is written by one function for each result shape, as a joined string without a tree. Texts are escaped so
that a client reads back exactly what was sent: a carriage return is written as a character reference, because a parser
turns a bare one into a line feed and the body's MD5 fails (XML 1.0, 2.11). Source: SQS Developer Guide, "Making Query
API requests"; AWS Query protocol.
"""

import re
from base64 import b64encode
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import msgspec

from veilmq.protocols import Bounded, Request, Response, address_used
from veilmq.protocols.sqs import errors, forms, limits
from veilmq.protocols.sqs.addresses import Endpoint
from veilmq.protocols.sqs.call import Form, Operation, Result
from veilmq.protocols.sqs.errors import Refusal, invalid_value
from veilmq.protocols.sqs.forms import (
    AttributeValueOut,
    Empty,
    ListQueuesResult,
    ListQueueTagsResult,
    ReceiveMessageResult,
)
from veilmq.protocols.sqs.operations import OPERATIONS

CONTENT_TYPE: Final = b"application/x-www-form-urlencoded"

Headers = tuple[tuple[bytes, bytes], ...]
Tree = dict[Any, Any]
_Place = tuple[int | None, tuple[Any, ...], Any]
"""Number of the batch entry or None; the path from there; the last step."""
_Pair = tuple[int | None, tuple[Any, ...], Any, str | int]
"""The same, and the value."""

_OF_THE_ACCOUNT: Final = frozenset({"CreateQueue", "ListQueues"})
"""Actions that are not sent to a queue's URL."""
_XML: Final = b"text/xml"
_JSON: Final = b"application/json"
_ENCODE: Final = msgspec.json.Encoder().encode
NAMESPACE: Final = f"http://queue.amazonaws.com/doc/{limits.API_VERSION}/"
_NOT_XML: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_LISTS: Final = {
    "AttributeName": "AttributeNames",
    "MessageAttributeName": "MessageAttributeNames",
    "MessageSystemAttributeName": "MessageSystemAttributeNames",
    "StringListValue": "StringListValues",
    "BinaryListValue": "BinaryListValues",
    "TagKey": "TagKeys",
    "ActionName": "Actions",
    "AWSAccountId": "AWSAccountIds",
}
"""Flattened lists of texts, `<name>.<number>` -> their names in the JSON form."""
_MAPS: Final = {
    "Attribute": "Attributes",
    "MessageAttribute": "MessageAttributes",
    "MessageSystemAttribute": "MessageSystemAttributes",
    "Tag": "tags",
}
"""Flattened maps, `<name>.<number>.<Name or Key>` and `<name>.<number>.Value`."""
_ENTRIES: Final = frozenset(
    {
        "SendMessageBatchRequestEntry",
        "DeleteMessageBatchRequestEntry",
        "ChangeMessageVisibilityBatchRequestEntry",
    }
)
"""Flattened lists of structures, `<name>.<number>.<member>`."""
# A list's JSON name is accepted too (MessageSystemAttributeNames.1), because some clients send it.
_MEMBER_OF_LIST: Final = _LISTS | {member: member for member in _LISTS.values()}
_MEMBER_OF_MAP: Final = _MAPS | {"Tags": "tags"}
_LIST_MEMBERS: Final = frozenset(_LISTS.values())
_MAP_MEMBERS: Final = frozenset(_MAPS.values())
_TEXT_MAPS: Final = frozenset({"Attributes", "tags"})

_COLLECTIONS: Final = frozenset({"Entries", *_ENTRIES, *_MEMBER_OF_LIST, *_MAPS, *_MAP_MEMBERS})

_INTEGERS: Final = frozenset(
    {
        "DelaySeconds",
        "MaxNumberOfMessages",
        "MaxNumberOfMessagesPerSecond",
        "MaxResults",
        "VisibilityTimeout",
        "WaitTimeSeconds",
    }
)
"""Members that are always integers. All others are text, in the form and in the tree."""
_INTEGER: Final = re.compile(r"-?[0-9]{1,30}")

_NAMES_MAX: Final = 4_096
_NAME_BYTES_CACHED_MAX: Final = 128
_NAME_CHARACTERS_MAX: Final = 256
"""Twice the longest valid name. Every dot of a name costs a step: a megabyte of them would stall the server."""
_PAIRS_MAX: Final = 2_048
_PAIR_BYTES_CACHED_MAX: Final = 512
_SAME_EACH_TIME: Final = frozenset({"Action", "Version", "QueueUrl", *_INTEGERS})
"""Members with few values: a client sends the same pairs each time."""

_names: Bounded[bytes, _Place] = Bounded(_NAMES_MAX)
_same: Bounded[bytes, _Pair] = Bounded(_PAIRS_MAX)
"""What such pairs say."""


def read(request: Request, endpoint: Endpoint) -> tuple[Operation, Any]:
    """The operation and its input. Raises Refusal naming the parameter that does not fit."""
    form = request.body
    if b"?" in request.target:
        form = request.query + b"&" + form if form else request.query
    if not form:
        raise nothing_asked()
    tree = _tree(form)
    action = tree.get("Action")
    if action is None:
        if request.method == "GET":
            raise nothing_asked()
        raise Refusal(errors.MISSING_ACTION, "The request must contain the parameter Action.")
    row = OPERATIONS.get(action)
    if row is None:
        raise _invalid_action(action)
    version = tree.get("Version")
    if version is not None and version not in limits.API_VERSIONS:
        raise Refusal(errors.NO_SUCH_VERSION, f"The requested version ( {version[:256]} ) is not valid.")
    if not tree.get("QueueUrl"):
        tree["QueueUrl"] = _url_of(request, row, endpoint)
    try:
        return row, msgspec.convert(tree, row.input_type)
    except msgspec.ValidationError as wrong:
        _check_integers(tree, row)
        raise Refusal(errors.INVALID_PARAMETER_VALUE, f"The request does not fit {row.name}: {wrong}") from None


def _url_of(request: Request, row: Operation, endpoint: Endpoint) -> str:
    """The queue URL that the request was sent to. Raises Refusal if the operation needs one and this is not one."""
    if request.target == b"/" or request.path == b"/":
        if "QueueUrl" not in row.input_type.__struct_encode_fields__:
            return ""
        shown = address_used(request, endpoint.trusted_proxy)[:256]
        raise Refusal(errors.INVALID_ADDRESS, f"The address {shown}/ is not valid for this endpoint.")
    if row.name in _OF_THE_ACCOUNT and limits.ACCOUNT_PATH.match(request.path):
        raise _invalid_action(row.name)
    path = request.path.decode("latin-1")
    # The whole URL is longer to look up: only where the host can tell the region.
    return path if endpoint.base_domain is None else address_used(request, endpoint.trusted_proxy) + path


def _check_integers(tree: Tree, row: Operation) -> None:
    """Raises Refusal naming a parameter that should be an integer. Unknown parameters may be anything."""
    known = {field.encode_name for field in msgspec.structs.fields(row.input_type)}
    nodes: list[tuple[str, Any]] = [("", {name: tree[name] for name in known & tree.keys()})]
    if "Entries" in known and isinstance(tree.get("Entries"), list):
        nodes += [(f"{row.name}RequestEntry.{number}.", entry) for number, entry in enumerate(tree["Entries"], 1)]
    for start, node in nodes:
        for name in node.keys() & _INTEGERS:
            if not isinstance(node[name], int):
                raise invalid_value(start + name, node[name], "Must be an integer.")


def nothing_asked() -> Refusal:
    """UnknownOperationException: a request without a single parameter, or a GET without an action."""
    return Refusal(errors.UNKNOWN_OPERATION, "The request names no action.")


def _invalid_action(action: str) -> Refusal:
    return Refusal(errors.INVALID_ACTION, f"The action {action[:256]} is not valid for this endpoint.")


def _tree(form: bytes) -> Tree:
    """The parameters as a tree like that of the JSON form."""
    if form.count(b"&") >= limits.FORM_PAIRS_MAX:
        text = f"A request can have at most {limits.FORM_PAIRS_MAX} parameters."
        raise Refusal(errors.MALFORMED_QUERY_STRING, text)
    tree: Tree = {}
    entries: dict[int, Tree] = {}
    deep = False
    for pair in form.split(b"&"):
        found = (_same.get(pair) if len(pair) <= _PAIR_BYTES_CACHED_MAX else None) or _read_pair(pair)
        if found is None:
            continue
        number, way, last, value = found
        node = tree
        if value == "" and (last in _COLLECTIONS or (way and b"." not in pair)):  # botocore writes an empty list so
            member = way[-1] if way else last
            if member in _LIST_MEMBERS:
                tree[member] = []
            continue
        if number is not None:
            node = entries.get(number) or entries.setdefault(number, {})
        if way:
            deep = True
            node = _descend(node, way, pair)
        if last in node:
            raise _repeated(pair)
        node[last] = value
    if deep:
        for node in (tree, *entries.values()):
            _fold(node)
    if entries:
        tree["Entries"] = [entries[number] for number in sorted(entries)]
    return tree


def _read_pair(pair: bytes) -> _Pair | None:
    """One parameter; None: it has no name."""
    name, _, raw = pair.partition(b"=")
    if not name:
        return None
    try:
        number, way, last = _names.get(name) or _learnt(name)
        text = _text(raw) if b"%" in raw or b"+" in raw else raw.decode()
    except UnicodeDecodeError:
        raise Refusal(errors.INVALID_PARAMETER_VALUE, f"The parameter {_shown(pair)} is not UTF-8.") from None
    found = number, way, last, int(text) if last in _INTEGERS and _INTEGER.fullmatch(text) else text
    if last in _SAME_EACH_TIME and len(pair) <= _PAIR_BYTES_CACHED_MAX:
        _same.keep(pair, found)
    return found


def _shown(pair: bytes) -> str:
    return pair.partition(b"=")[0][:256].decode("latin-1")


def _repeated(pair: bytes) -> Refusal:
    return Refusal(errors.MALFORMED_QUERY_STRING, f"The parameter {_shown(pair)} is repeated.")


def _text(raw: bytes) -> str:
    return unquote_to_bytes(raw.replace(b"+", b" ")).decode()


def _learnt(raw: bytes) -> _Place:
    """The place of a parameter, cached: clients send the same few names."""
    name = _text(raw)
    steps = _steps(name) if len(name) <= _NAME_CHARACTERS_MAX else (name,)
    number = None
    if steps[0] == "Entries" and len(steps) > 2:
        number, steps = steps[1], steps[2:]
    place = (number, steps[:-1], steps[-1])
    return _names.keep(raw, place) if len(raw) <= _NAME_BYTES_CACHED_MAX else place


def _steps(name: str) -> tuple[Any, ...]:
    """The path of a parameter from the tree's root; an unknown name stays a plain name."""
    head, _, rest = name.partition(".")
    digits, _, further = rest.partition(".")
    number = 1
    if digits.isascii() and digits.isdigit() and len(digits) <= 9:
        number = int(digits)
    else:  # an old form omits the number of the first element: Attribute.Name, AttributeName
        further = rest
    if head in _ENTRIES and further:
        return ("Entries", number, *_steps(further))
    if head in _MEMBER_OF_LIST and not further:
        return (_MEMBER_OF_LIST[head], number)
    if head in _MEMBER_OF_MAP and further:
        part, _, inside = further.partition(".")
        return (_MEMBER_OF_MAP[head], number, part, *(_steps(inside) if inside else ()))
    return (name,)


def _descend(node: Tree, way: tuple[Any, ...], pair: bytes) -> Tree:
    for step in way:
        node = node.setdefault(step, {})
        if not isinstance(node, dict):
            raise _repeated(pair)
    return node


def _fold(node: Tree) -> None:
    """Convert numbered elements to the lists and maps of the JSON form."""
    for member, elements in node.items():
        if not isinstance(elements, dict):
            continue
        if member in _LIST_MEMBERS:
            node[member] = [elements[number] for number in sorted(elements)]
        elif member in _MAP_MEMBERS:
            node[member] = _map(member, elements)


def _map(member: str, elements: dict[int, Tree]) -> Tree:
    label = "Key" if member == "tags" else "Name"
    empty: Any = "" if member in _TEXT_MAPS else {}
    folded: Tree = {}
    for number in sorted(elements):
        element = elements[number]
        key, value = element.get(label, ""), element.get("Value", empty)  # an empty key is refused later, as in JSON
        if not isinstance(key, str):
            raise Refusal(errors.INVALID_PARAMETER_VALUE, f"{label} of element {number} of {member} must be a text.")
        if key in folded:
            raise Refusal(errors.INVALID_PARAMETER_VALUE, f"{label} of element {number} of {member} is repeated.")
        if isinstance(value, dict):
            _fold(value)
        folded[key] = value
    return folded


def write(operation: str, result: Result, form: Form, request_id: str, headers: Headers) -> Response:
    """The response of a successful operation."""
    if form is Form.QUERY:
        return Response(200, _XML, _xml_answer(operation, result, request_id), headers)
    named: Tree = {"ResponseMetadata": {"RequestId": request_id}}
    if not isinstance(result, Empty):
        named[f"{operation}Result"] = _json_result(result)
    return Response(200, _JSON, _ENCODE({f"{operation}Response": named}), headers)


def _json_result(result: Result) -> Any:
    """The result with AWS's names: two lists in this form begin in lower case."""
    if isinstance(result, ReceiveMessageResult):
        return {"messages": _with_nulls(result.messages)}
    if isinstance(result, ListQueuesResult):
        return {"queueUrls": result.queue_urls or [], "nextToken": result.next_token}
    if isinstance(result, ListQueueTagsResult):
        return {"Tags": [{"Key": key, "Value": value} for key, value in (result.tags or {}).items()]}
    return _with_nulls(result)


def _with_nulls(value: Any) -> Any:
    """All members of a shape, with null for missing values, and maps as lists of pairs, as in XML.

    The form is undocumented, but responses of AWS have it, and users of API Gateway in front of a queue depend on it.
    """
    if isinstance(value, msgspec.Struct):
        members = {
            field.encode_name: _with_nulls(getattr(value, field.name)) for field in msgspec.structs.fields(value)
        }
        if isinstance(value, AttributeValueOut):
            members |= {"StringListValues": None, "BinaryListValues": None}
        return members
    if isinstance(value, list):
        return [_with_nulls(element) for element in value]
    if isinstance(value, dict):
        return [{"Name": name, "Value": _with_nulls(inside)} for name, inside in value.items()]
    return value


def write_refusal(refusal: Refusal, form: Form, request_id: str, headers: Headers) -> Response:
    """An error."""
    fault = refusal.fault
    if fault is errors.UNKNOWN_OPERATION:
        return Response(fault.status, _XML, b"<UnknownOperationException/>\n", headers)
    blame = "Sender" if fault.sender else "Receiver"
    message = errors.QUERY_WORDS.get(refusal.message, refusal.message)
    if form is Form.QUERY_JSON:
        error = {"Code": fault.code, "Message": message, "Type": blame}
        return Response(fault.status, _JSON, _ENCODE({"Error": error, "RequestId": request_id}), headers)
    body = _xml_error(blame, fault.code, message, request_id)
    return Response(fault.status, _XML, body, headers)


def _escape(text: str) -> str:
    """The text as character data. AWS writes a carriage return as `&#xD;`, the only reference that the older JavaScript
    SDK (3.200 to 3.300, Query form) reads (aws/aws-sdk-js-v3 #2362)."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\r", "&#xD;")


def _xml_answer(operation: str, result: Result, request_id: str) -> bytes:
    """A complete response."""
    write = _WRITERS.get(type(result))
    inside = ""
    if write is not None:
        inside = write(operation, result)
        inside = f"<{operation}Result>{inside}</{operation}Result>" if inside else f"<{operation}Result/>"
    return (
        f'<?xml version="1.0"?><{operation}Response xmlns="{NAMESPACE}">{inside}'
        f"<ResponseMetadata><RequestId>{request_id}</RequestId></ResponseMetadata></{operation}Response>"
    ).encode()


def _xml_error(blame: str, code: str, message: str, request_id: str) -> bytes:
    """A complete error response; characters of the message that XML cannot carry are replaced."""
    text = _escape(_NOT_XML.sub("\ufffd", message))
    return (
        f'<?xml version="1.0"?><ErrorResponse xmlns="{NAMESPACE}"><Error><Type>{blame}</Type><Code>{code}</Code>'
        f"<Message>{text}</Message><Detail/></Error><RequestId>{_escape(request_id)}</RequestId></ErrorResponse>"
    ).encode()


def _optional(name: str, text: str | None) -> str:
    return "" if text is None else f"<{name}>{text}</{name}>"


def _pairs(name: str, texts: dict[str, str] | None) -> str:
    if not texts:
        return ""
    return "".join(f"<{name}><Name>{key}</Name><Value>{_escape(text)}</Value></{name}>" for key, text in texts.items())


def _sent(operation: str, result: forms.SendMessageResult | forms.SendMessageBatchResultEntry) -> str:
    return (
        f"<MessageId>{result.message_id}</MessageId><MD5OfMessageBody>{result.md5_of_message_body}</MD5OfMessageBody>"
        + _optional("MD5OfMessageAttributes", result.md5_of_message_attributes)
        + _optional("MD5OfMessageSystemAttributes", result.md5_of_message_system_attributes)
        + _optional("SequenceNumber", result.sequence_number)
    )


def _batch(operation: str, result: forms.BatchResult) -> str:
    name = f"{operation}ResultEntry"
    parts = []
    for line in result.successful:
        more = _sent(operation, line) if isinstance(line, forms.SendMessageBatchResultEntry) else ""
        parts.append(f"<{name}><Id>{line.id}</Id>{more}</{name}>")
    for failure in result.failed:
        parts.append(
            f"<BatchResultErrorEntry><Id>{failure.id}</Id><Code>{failure.code}</Code>"
            f"<Message>{_escape(_NOT_XML.sub(_REPLACEMENT, failure.message))}</Message>"
            f"<SenderFault>{'true' if failure.sender_fault else 'false'}</SenderFault></BatchResultErrorEntry>"
        )
    return "".join(parts)


_REPLACEMENT: Final = "\ufffd"


def _messages(operation: str, result: forms.ReceiveMessageResult) -> str:
    return "".join(_message(message) for message in result.messages or ())


def _message(message: forms.Message) -> str:
    start = (
        f"<Message><MessageId>{message.message_id}</MessageId><ReceiptHandle>{message.receipt_handle}</ReceiptHandle>"
        f"<MD5OfBody>{message.md5_of_body}</MD5OfBody><Body>{_escape(message.body)}</Body>"
    )
    if message.attributes is None and message.message_attributes is None:
        return start + "</Message>"
    attributes = "".join(
        f"<MessageAttribute><Name>{_escape(name)}</Name><Value>{_value(value)}</Value></MessageAttribute>"
        for name, value in (message.message_attributes or {}).items()
    )
    digest = _optional("MD5OfMessageAttributes", message.md5_of_message_attributes)
    return f"{start}{_pairs('Attribute', message.attributes)}{digest}{attributes}</Message>"


def _value(value: forms.AttributeValueOut) -> str:
    if value.string_value is not None:
        content = f"<StringValue>{_escape(value.string_value)}</StringValue>"
    else:
        content = f"<BinaryValue>{b64encode(value.binary_value or b'').decode()}</BinaryValue>"
    return f"{content}<DataType>{_escape(value.data_type)}</DataType>"


def _tags(operation: str, result: forms.ListQueueTagsResult) -> str:
    return "".join(
        f"<Tag><Key>{_escape(key)}</Key><Value>{_escape(value)}</Value></Tag>"
        for key, value in (result.tags or {}).items()
    )


def _tasks(operation: str, result: forms.ListMessageMoveTasksResult) -> str:
    return "".join(_task(entry) for entry in result.results)


def _task(entry: forms.MoveTaskEntry) -> str:
    members = msgspec.to_builtins(entry)
    inside = "".join(f"<{name}>{_escape(str(value))}</{name}>" for name, value in members.items())
    return f"<ListMessageMoveTasksResultEntry>{inside}</ListMessageMoveTasksResultEntry>"


def _url_elements(operation: str, result: forms.ListQueuesResult | forms.ListDeadLetterSourceQueuesResult) -> str:
    urls = "".join(f"<QueueUrl>{_escape(url)}</QueueUrl>" for url in result.queue_urls or ())
    return urls + _optional("NextToken", result.next_token)


_WRITERS: Final[dict[type, Callable[[str, Any], str]]] = {
    forms.SendMessageResult: _sent,
    forms.BatchResult: _batch,
    forms.ReceiveMessageResult: _messages,
    forms.QueueUrlResult: lambda operation, result: f"<QueueUrl>{_escape(result.queue_url)}</QueueUrl>",
    forms.ListQueuesResult: _url_elements,
    forms.ListDeadLetterSourceQueuesResult: _url_elements,
    forms.ListQueueTagsResult: _tags,
    forms.StartMessageMoveTaskResult: lambda operation, result: _optional("TaskHandle", result.task_handle),
    forms.CancelMessageMoveTaskResult: lambda operation, result: _optional(
        "ApproximateNumberOfMessagesMoved", str(result.approximate_number_of_messages_moved)
    ),
    forms.ListMessageMoveTasksResult: _tasks,
    forms.GetQueueAttributesResult: lambda operation, result: _pairs("Attribute", result.attributes),
}
"""Empty is not included: its response contains only metadata."""
