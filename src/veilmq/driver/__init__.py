"""The driver: clients that use a queue in every way, and write down what they did for the history checker.

Strategy: `recorded` wraps any queue of the client library, so a run works against whatever that reaches. `load` is one
client, `rounds` many of them with a drain and a check at the end, `log` the run's file.
"""
