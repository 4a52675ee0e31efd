"""The client library: one port (`Queue`), its adapters, and the consumer patterns on top.

Strategy: an adapter says a cloud's own words to that cloud; a pattern wraps a `Queue` and is a `Queue`, so that they
stack; keeper, worker, receiver and timeouts work on any. Adapters import their SDK only when they are asked for.
Modules import downward: the documents' names, patterns, `connect`, adapters, what adapters share, the port
(pyproject.toml, the contract `client`).
Durations are seconds, as int or float. Source: the five documents of docs/from-the-documents.md,
which the docstrings here name by their numbers.
"""
