"""Jobs on the history: functions from DataFrame to DataFrame, the same on `local[*]`, a cluster or Spark Connect.

    from veilmq.pipeline.jobs.attempts import attempts
    from veilmq.pipeline.jobs.timeouts import timeouts

    events = spark.read.format("veilmq-events").option("path", "exported").load()
    timeouts(attempts(events)).show()

Strategy: `attempts` turns events into one row per lease, the table that the other jobs start from; each docstring lists
the columns that the job returns. Jobs open no session, write no file and read no clock; `pipeline.loop`,
`pipeline.tables` and the command line do that. The estimates that jobs share, without Spark, are in
`pipeline.estimates`. Source: docs/pipeline.md; documents 003 and 004 of docs/from-the-documents.md.
"""
