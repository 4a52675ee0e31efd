"""What `/api/v1` takes and gives, without HTTP: the command line uses it on a directory that no server holds.

Strategy: `operations` turns a request's members (`inputs`) into the same commands that the protocols use, and their
outcomes into plain values (`views`); `errors` says how an error is shown, and with which status.
"""
