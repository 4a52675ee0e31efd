"""The admin port: health, metrics, `/api/v1` and the event feed, as an ordinary ASGI application.

Strategy: `create_app` (app.py) collects the routes; access.py authenticates a request, `api.operations` turns it into
the same commands that the protocols use and their outcomes into JSON, and the shell runs them. Reads of many rows
(`history`) use a reading connection on a thread. `api` and `history` itself know nothing of HTTP: the command line
uses them on a directory that no server holds.
"""
