"""`veilmq` as a release that does not exist: its tables are one more, and it works without that one, too.

Run it as a program in place of `python -m veilmq`.
"""

from veilmq.store.sqlite.disk import schema

vars(schema).update(
    OLDEST_SERVED=schema.VERSION,
    MIGRATIONS=(*schema.MIGRATIONS, "CREATE TABLE later (id INTEGER PRIMARY KEY) STRICT"),
    VERSION=schema.VERSION + 1,
)

if __name__ == "__main__":
    from veilmq.__main__ import main

    main()
