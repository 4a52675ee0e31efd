"""The history checker: what clients did with a queue, and whether the queue kept its promises.

Strategy: a log (`log.py`) holds one operation for each call of a client, with the times before and after it. `check`
(`checker.py`) decides on the log alone, so it works for any queue of any cloud. It reports only what no correct queue
could have answered: wherever times overlap or an answer is missing, it assumes whatever excuses the queue.
"""
