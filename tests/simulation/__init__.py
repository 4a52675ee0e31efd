"""Deterministic simulation of engine, store and shell: a seed decides everything.

Strategy: the product's own shell runs on an event loop whose time is a number (loop.py), over the product's own store
on a faulty disk in memory (disk.py). Clients (clients.py) and faults (world.py) draw from one seeded generator, so that
a seed repeats a life to the step. The history checker, the store's own check and a drain at the end decide (world.py).
`python -m tests.simulation` runs many seeds.
"""
