"""The engine, without I/O: batches, waiting receives, and timers.

Strategy: a shell (asyncio in server/, a thread in client/) owns the clock and the threads. It submits commands, takes a
batch, lets the store apply and commit it, hands the result back, and delivers the answers. The engine never calls the
store and never reads a clock. directory.py is the one place here that knows SQLite. This module imports nothing: who
only needs the limits (every command of the command line) shall not load a store.
"""
