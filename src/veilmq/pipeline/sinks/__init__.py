"""Where rows go: into a queue (`format("veilmq")`), or into a Delta table (`format("veilmq-delta")`).

Strategy: `queue` sends in the protocol's batches, with a deduplication id that is the same when Spark repeats a task;
`delta` lets executors write Parquet and the driver commit it, once a micro-batch, in one transaction.
"""
