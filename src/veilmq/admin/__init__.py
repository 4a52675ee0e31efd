"""The admin port: health, metrics, `/api/v1` and the event feed, as an ordinary ASGI application.

Strategy: `create_app` (app.py) puts routes together; access.py lets a request in, `operations.py` turns it into the
same commands that the protocols use and their outcomes into JSON, and the shell runs them. What reads many rows does
so on a reading connection in a thread. `operations`, `views` and `reading` know nothing of HTTP: the command line
uses them on a directory that no server holds.
"""
