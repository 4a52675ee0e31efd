"""Writes XML responses as joined strings, without a tree.

The namespace has a final slash, except in `Error`: the Java SDK reads errors only without it, and everything else only
with it. Other clients read both.
"""

from typing import Final

from veilmq.protocols.http import Response
from veilmq.protocols.xml import clean, escape

CONTENT_TYPE: Final = b"text/xml;charset=utf-8"
"""Without `text/xml`, @alicloud/mns reads an error as a success."""
DECLARATION: Final = '<?xml version="1.0" encoding="UTF-8"?>\n'
XMLNS: Final = 'xmlns="http://mns.aliyuncs.com/doc/v1/"'
_ERROR_XMLNS: Final = 'xmlns="http://mns.aliyuncs.com/doc/v1"'


def document(root: str, inside: str, status: int = 200) -> Response:
    """A response with one document."""
    return Response(status, CONTENT_TYPE, f"{DECLARATION}<{root} {XMLNS}>{inside}</{root}>".encode())


def elements(fields: dict[str, str]) -> str:
    """An element for each field. An empty element in a list crashes the Python SDK, so omit it."""
    return "".join([f"<{name}>{escape(text)}</{name}>" for name, text in fields.items()])


def error_body(code: str, message: str, request_id: str, host: str) -> bytes:
    """An error document. The Python SDK treats one without all four children as a broken connection."""
    fields = f"<Code>{code}</Code><Message>{clean(message)}</Message><RequestId>{request_id}</RequestId>"
    return f"{DECLARATION}<Error {_ERROR_XMLNS}>{fields}<HostId>{clean(host)}</HostId></Error>".encode()
