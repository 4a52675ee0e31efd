"""What adapters and patterns share: checks before any I/O, batches, threads, and receives that wait."""
