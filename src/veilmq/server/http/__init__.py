"""HTTP/1.1 of the data ports: from the bytes of a connection to a complete request, and from a response to bytes.

Strategy: `listener.Listener` is one port; each `connection.Connection` passes one request at a time to its handler. A
request that came whole and plain is read at once, every other one by llhttp (intake). Nothing here knows a protocol.
"""
