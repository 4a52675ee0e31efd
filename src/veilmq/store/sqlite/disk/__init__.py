"""Files and connections: the redo log, the schema. Knows no queue."""
