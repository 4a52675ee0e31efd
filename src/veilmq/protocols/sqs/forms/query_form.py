"""The Query form: reads the parameters of a form body or query string.

Strategy: names such as `SendMessageBatchRequestEntry.2.MessageAttribute.1.Value.DataType` are folded into the tree that
the JSON form would send, by one table of the lists and maps that the service model flattens; msgspec converts it to the
operation's input. A plain batch is read in one step before that (query_batches.py). Source: SQS
Developer Guide, "Making Query API requests"; AWS Query protocol.
"""

import re
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import msgspec

from veilmq.protocols import Bounded, Request, address_used
from veilmq.protocols.sqs import errors, limits
from veilmq.protocols.sqs.addresses import Endpoint
from veilmq.protocols.sqs.call import Operation
from veilmq.protocols.sqs.errors import Refusal, invalid_value
from veilmq.protocols.sqs.forms.query_batches import STARTS, read_batch
from veilmq.protocols.sqs.operations import OPERATIONS

CONTENT_TYPE: Final = b"application/x-www-form-urlencoded"

Tree = dict[Any, Any]
_Place = tuple[int | None, tuple[Any, ...], Any]
"""Number of the batch entry or None; the path from there; the last step."""
_Pair = tuple[int | None, tuple[Any, ...], Any, str | int]
"""The same, and the value."""

_OF_THE_ACCOUNT: Final = frozenset({"CreateQueue", "ListQueues"})
"""Actions that are not sent to a queue's URL."""

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
# The JSON name of a list, and of these two maps, is accepted too: some clients send it (MessageAttributes:
# aws/aws-sdk-php #694).
_MEMBER_OF_LIST: Final = _LISTS | {member: member for member in _LISTS.values()}
_MEMBER_OF_MAP: Final = _MAPS | {"MessageAttributes": "MessageAttributes", "Tags": "tags"}
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
_PERCENTS_MAX: Final = 10_000
"""In a text that is read slowly: a microsecond and 190 bytes of memory each."""
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
    return (form.startswith(STARTS) and read_batch(form)) or _read(form, request, endpoint)


def _read(form: bytes, request: Request, endpoint: Endpoint) -> tuple[Operation, Any]:
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
    pairs = form.split(b"&", limits.FORM_PAIRS_MAX)
    if len(pairs) > limits.FORM_PAIRS_MAX:
        text = f"A request can have at most {limits.FORM_PAIRS_MAX} parameters."
        raise Refusal(errors.MALFORMED_QUERY_STRING, text)
    tree: Tree = {}
    entries: dict[int, Tree] = {}
    deep, known = False, _same.get
    for pair in pairs:
        found = (known(pair) if len(pair) <= _PAIR_BYTES_CACHED_MAX else None) or _read_pair(pair)
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
    spaced = raw.replace(b"+", b" ")
    try:  # with `\x3A` for `%3A` these are escapes of Python, which C reads
        text = spaced.replace(b"\\", rb"\\").replace(b"%", rb"\x").decode("unicode_escape")
    except UnicodeDecodeError:  # a bare percent sign, which stays one
        if spaced.count(b"%") > _PERCENTS_MAX:
            text = "A parameter has too many percent signs of which some are no escapes."
            raise Refusal(errors.MALFORMED_QUERY_STRING, text) from None
        return unquote_to_bytes(spaced).decode()
    return text.encode("latin-1").decode()


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
