"""Amazon SQS on the wire: JSON 1.0 and Query, Signature V4, limits and errors as data.

Strategy: only a codec. `codec.Codec.decode` turns a complete HTTP request into commands or refuses it, and `encode`
turns their outcomes into a response. Source: the Amazon SQS API Reference, version 2012-11-05, and the service model
that AWS publishes with its SDKs.
"""
