"""Files and connections: the redo log, the schema. This room knows nothing of queues."""
