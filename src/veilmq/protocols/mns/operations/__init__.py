"""The operations of MNS, by noun: turn requests into commands, and outcomes into responses.

Strategy: `table.find` names them all; a new operation is a pair of functions and a row there.
"""
