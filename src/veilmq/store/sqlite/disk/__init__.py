"""Files and connections: the data directory, the redo log, the schema. Knows no queue."""
