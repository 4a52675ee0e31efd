"""Files and connections: the redo log (redo/), the schema. This room knows nothing of queues."""
