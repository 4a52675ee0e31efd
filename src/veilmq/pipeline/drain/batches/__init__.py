"""What the driver does with batches: receives them, keeps their leases and known ids, deletes what Spark committed.

Strategy: without Spark. `receiving` and `deleting` call the queue from threads of their own, so that the next batch is
received while the last one is deleted; `ledger` decides which messages are new. `drain.driver` calls all three.
"""
