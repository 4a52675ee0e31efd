"""The operations of MNS: requests to commands, outcomes to answers, by noun.

Strategy: `table.find` names them all; a new operation is a pair of functions and a row there.
"""
