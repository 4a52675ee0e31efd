"""The client library: one interface (`Queue`), an adapter for each service, and the consumer patterns on top.

Strategy: an adapter translates `Queue` into one cloud's API. A pattern wraps a `Queue` and is itself a `Queue`, so
patterns stack; keeper, worker, receiver and timeouts work on any of them. An adapter imports its SDK only when it is
used.

Where things are: `queue` is the port, `messages` what goes in and comes out, `errors` and `clock` complete it.
`checks`, `batches`, `threads`, `waits`, `unreadable` and `wrapping` are what adapters and patterns share. `adapters`
has a folder for each protocol, `connect` opens them by a URL. Every other folder or module is a pattern; `documents`
has the names of the source documents.

Before changing it: modules import downward: the documents' names, patterns, `connect`, adapters, what adapters share,
the port (pyproject.toml, the contract `client`). Durations are seconds, as int or float.

Source: the five documents of docs/from-the-documents.md; the docstrings here cite them by number.
"""
