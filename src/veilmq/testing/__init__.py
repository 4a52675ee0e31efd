"""What tests import, ours and a user's: contracts, reference model, manual clock, faults.

Strategy: everything here drives the real thing. Time is a value that the test sets, a fault is put in through a seam
(the file layer under SQLite, the store's named points), and what must hold is written once and run on every store.
"""
