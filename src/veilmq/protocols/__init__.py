"""The wire protocols: pure codecs from bytes to commands, and from outcomes to bytes.

Each protocol has its own room and knows no other. They share the two values in `protocols.http`, the strict XML and the
caches. There is no engine, no store, no clock and no I/O here.
"""
