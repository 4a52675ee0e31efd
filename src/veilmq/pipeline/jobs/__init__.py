"""What the history tells: jobs from DataFrame to DataFrame, the same on `local[*]`, a cluster or Spark Connect.

    events = spark.read.format("veilmq-events").option("path", "exported").load()
    leases = attempts(events)
    recommended = timeouts(leases)

Strategy: `attempts` turns events into one row a lease, the table that the others start from; each says in its docstring
which columns it needs and gives. Nothing here opens a session, writes a file or reads a clock. Source: seeds 003 and
004; docs/pipeline.md.
"""

from veilmq.pipeline.jobs.attempts import attempts

__all__ = ["attempts"]
