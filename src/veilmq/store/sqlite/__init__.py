"""The default store: one SQLite database in a directory that one process owns.

Strategy: a message is appended once to `message` and never moved; where it is follows from two narrow things. While it
waits in its line, a cursor in memory stands before it. Once it was delayed or received it has a row in `lease`: hidden
until an instant, or returned. Purging or deleting a queue gives it a fresh `generation` and leaves the old one's rows
to the sweeper, so that neither costs more for a million messages than for one. Counts, cursors and settings live in
memory, change and roll back with the batch, and are rebuilt at start from the narrow indexes.

The rooms, each of which imports from those below it alone:

    store, loading   the store, and how it is opened
    reader           what may be read of it (veilmq.store.reader)
    tools            backup, check
    reading          peeks, rows, history
    upkeep           sweeps, move tasks, snapshots, trimming
    settings         queues, topics, plans
    leases           receives; extend, release, delete
    messages         sends, places, groups, expiry, dead letters
    batch            the writer, and the state in memory
    disk             connections, redo log, schema
"""
