"""Reads of many rows: pages of messages, traces, events by offset, snapshots and backups.

Strategy: `reading` reads one committed state of the store, and knows nothing of HTTP: the command line uses it on a
directory that no server holds. `feed` has the routes, `copies` bounds how many snapshots and backups are being sent.
"""
