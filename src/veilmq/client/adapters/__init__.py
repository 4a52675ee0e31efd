"""The adapters: each translates the port into one cloud's API, or into a data directory's commands.

Strategy: one folder for each protocol. It implements the port itself; its `calls` makes the calls, converts messages to
the service's form and back, and turns what goes wrong into our errors. An adapter imports its SDK, so it is imported
only when it is used: `connect` opens a URL or an SDK's object.

Before changing it: adapters do not import each other; what several of them need is in `cloud` and `service_errors`.
"""
