"""Who holds the messages of queues, and why messages failed."""
