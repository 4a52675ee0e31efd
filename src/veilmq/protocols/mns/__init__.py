"""Alibaba Cloud MNS on the wire: API version 2015-06-06, signatures V2 and V4, limits and errors as data.

Strategy: a codec, nothing else. `codec.Codec.decode` turns a complete HTTP request into commands or refuses it, and
`encode` turns their outcomes into an answer. What real clients need and the documents leave open is decided in
docs/mns.md.
"""
