"""The client library: one interface (`Queue`), an adapter for each service, and the consumer patterns on top.

Strategy: an adapter translates `Queue` into one cloud's API. A pattern wraps a `Queue` and is itself a `Queue`, so
patterns stack; keeper, worker, receiver and timeouts work on any of them. An adapter imports its SDK only when it is
used.

Where things are: `queue` is the port, `messages` what goes in and comes out, `errors` and `clock` complete it. `shared`
is what adapters and patterns share, `wrapping` and `unreadable` what patterns share, `records` what they keep.
`adapters` has a folder for each protocol; `adapters.connect` opens them by a URL. Every other folder is a pattern;
`documents` has the names of the source documents.

Before changing it: modules import downward: the documents' names, patterns, adapters, `records`, `unreadable` and
`wrapping`, `shared`, the port (pyproject.toml, the contract `client`). Durations are seconds, as int or float.

Source: the five documents of docs/from-the-documents.md; the docstrings here cite them by number.
"""
