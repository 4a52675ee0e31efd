"""Many servers: one shard's log and its owner, in PostgreSQL.

Strategy: PostgreSQL replicates the log and decides who owns the shard; the state stays in SQLite. Everything rests on
two facts: an append and a take-over lock the same row, and the log has no gap. So a server that lost the shard appends
nothing, whatever it believes. `postgres` is the connection and what PostgreSQL must be set to, `schema` the tables,
`ownership` the epoch and the lease, `log` the append and the reading.

Before changing it: each rule here was seen to lose or resurrect messages when it was left out
(docs/decisions/0028-log-in-postgresql.md, tools/mutants/cluster).
"""
