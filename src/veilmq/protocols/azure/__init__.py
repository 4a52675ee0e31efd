"""Azure Queue Storage on the wire: the REST API, SharedKey, SAS and bearer tokens, limits and errors as data.

Strategy: a codec, nothing else. `codec.Codec.decode` turns a complete HTTP request into commands or refuses it, and
`encode` turns their outcomes into an answer; where a request cannot be judged without something that is stored (an
access policy, CORS rules), the first commands ask for that, and `encode` gives the call that follows. Source: the Queue
Storage REST API on learn.microsoft.com, up to version 2026-10-06.
"""
