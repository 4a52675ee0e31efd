"""`make pipeline-faults`: kills and faults at every step of source and sinks, and what tables and queues then hold."""
