"""The default store: one SQLite database in a directory that one process owns.

Strategy: a message is appended once to `message` and never moved. Its state follows from two small things. While it
waits in its line, the line's cursor in memory has not reached it. Once it was delayed or received it has a row in
`lease`: hidden until an instant, or returned. Purging or deleting a queue gives it a fresh `generation` and leaves the
old generation's rows to the sweeper, so both cost the same for one message and for a million. Counts, cursors and
settings live in memory, change and roll back with the batch, and are rebuilt at start from narrow indexes.

The rooms; each imports only from those below it:

    store, loading   the store, and how it is opened
    handlers         which function runs which command, in which order
    reader           reads beside the batches (veilmq.store.reader)
    repair           check --repair
    tools            backup, check
    reading          peeks, rows, history
    upkeep           sweeps, move tasks, snapshots, trimming
    settings         queues, topics, plans
    leases           receives; extend, release, delete, expiry
    messages         sends, places, groups, dead letters
    batch            the writer, and the state in memory
    raw              the files past SQLite, for repair
    disk             connections, redo log, schema
"""
