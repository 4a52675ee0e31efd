"""The open batch, and the state in memory that rolls back with it: queues, topics, unflushed messages."""
