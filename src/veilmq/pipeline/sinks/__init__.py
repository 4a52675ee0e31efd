"""Writes rows into a queue (`format("veilmq")`) or into a Delta table (`format("veilmq-delta")`).

Strategy: `queue` sends in the protocol's batches, with a deduplication id that stays the same when Spark repeats a
task. In `delta`, executors write Parquet and the driver commits it, in one transaction per micro-batch, if the rows fit
the table (`columns`) and the table does not have the batch (`claims`).
"""
