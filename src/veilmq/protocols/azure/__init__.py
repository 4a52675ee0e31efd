"""Azure Queue Storage on the wire: the REST API, SharedKey, SAS and bearer tokens, limits and errors as data.

Strategy: only a codec. `codec.Codec.decode` turns a complete HTTP request into commands or refuses it, and `encode`
turns their outcomes into a response. If a request depends on stored data (an access policy, CORS rules), the first
commands read it, and `encode` returns the call that follows. Source: the Queue Storage REST API on learn.microsoft.com,
up to version 2026-10-06.
"""
