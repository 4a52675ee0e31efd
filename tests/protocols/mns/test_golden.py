"""Answers byte by byte, where a client needs just these: those clients are not to be had here, and run elsewhere.

Java reads `<Error>` in the namespace without the final slash only (JAXB), and every other document in the one with it.
Go (encoding/xml) and PHP (XMLReader) go by names without namespaces. PHP reads user properties to the end of the
document, so that nothing may follow them; and of a system property it passes over the node behind each element, which
has to be white space.
"""

import re
from typing import Any

from veilmq.protocols import Response

DECLARATION = b'<?xml version="1.0" encoding="UTF-8"?>\n'
MESSAGES = "/queues/jobs/messages"


def test_an_error(wire: Any) -> None:
    response: Response = wire.ask("GET", "/queues/none").response
    named = re.sub(rb"(<RequestId>)[0-9A-F]{24}<", rb"\1ID<", response.body)
    assert named == DECLARATION + (
        b'<Error xmlns="http://mns.aliyuncs.com/doc/v1"><Code>QueueNotExist</Code>'
        b"<Message>The queue name you provided is not exist.</Message><RequestId>ID</RequestId>"
        b"<HostId>http://127.0.0.1:9326</HostId></Error>"
    )


def test_errors_of_the_entries_of_a_batch(wire: Any) -> None:
    body = "<ReceiptHandles><ReceiptHandle>a-b</ReceiptHandle></ReceiptHandles>"
    response: Response = wire.ask("DELETE", MESSAGES, body).response
    assert response.body.startswith(DECLARATION + b'<Errors xmlns="http://mns.aliyuncs.com/doc/v1/"><Error><ErrorCode>')


def test_a_message_with_properties(wire: Any) -> None:
    user = "<PropertyValue><Name>kind</Name><Value>film</Value><Type>STRING</Type></PropertyValue>"
    system = "<SystemPropertyValue><Name>traceparent</Name><Value>00-1</Value><Type>STRING</Type></SystemPropertyValue>"
    properties = f"<UserProperties>{user}</UserProperties><SystemProperties>{system}{system.replace('parent', 'state')}"
    wire.ask("POST", MESSAGES, f"<Message><MessageBody>x</MessageBody>{properties}</SystemProperties></Message>")
    response: Response = wire.ask("GET", f"{MESSAGES}?waitseconds=0").response
    head, _, tail = response.body.partition(b"<SystemProperties>")
    assert head.startswith(DECLARATION + b'<Message xmlns="http://mns.aliyuncs.com/doc/v1/"><MessageId>')
    assert tail == (
        b"<SystemPropertyValue><Name>traceparent</Name>\n<Value>00-1</Value>\n<Type>STRING</Type>\n"
        b"</SystemPropertyValue>"
        b"<SystemPropertyValue><Name>tracestate</Name>\n<Value>00-1</Value>\n<Type>STRING</Type>\n"
        b"</SystemPropertyValue></SystemProperties>"
        b"<UserProperties><PropertyValue><Name>kind</Name><Value>film</Value><Type>STRING</Type></PropertyValue>"
        b"</UserProperties></Message>"
    )


def test_an_empty_element_has_two_tags(wire: Any) -> None:
    """Of `<LoggingBucket/>` PHP would pass over what follows."""
    assert b"<LoggingBucket></LoggingBucket></Account>" in wire.ask("GET", "/?accountmeta=true").response.body
