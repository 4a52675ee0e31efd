"""Many servers: PostgreSQL replicates the log of a shard and decides who owns it; the state stays in SQLite.

Strategy: everything rests on two facts: an append and a take-over lock the same row, and the log has no gap. So a
server that lost the shard appends nothing, whatever it believes. `postgres` is what stands in PostgreSQL: the
connection and what must be set there, `schema` the tables, `ownership` the epoch and the lease, `log` the append and
the reading, `snapshots` whole copies. `member` is one server, which follows until it owns. `peer` passes clients' calls
on to the owner; it knows nothing of PostgreSQL.

Before changing it: each rule here was seen to lose or resurrect messages when it was left out
(docs/decisions/0028-log-in-postgresql.md, tools/mutants/cluster).
"""
