"""Alibaba Cloud MNS on the wire: API version 2015-06-06, signatures V2 and V4, limits and errors as data.

Strategy: only a codec. `codec.Codec.decode` turns a complete HTTP request into commands or refuses it, and `encode`
turns their outcomes into a response. docs/mns.md records the decisions about what the documents leave open and real
clients need.
"""
