"""The wire protocols: pure codecs from bytes to commands, and from outcomes to bytes.

Each protocol has a room of its own and knows no other; what they share is the pair of values in `protocols.http`, and
beside it the strict XML and the bounded cache. There is no engine, no store, no clock and no I/O here.
"""
