"""The operations of SQS, by noun: turn inputs into commands, and outcomes into results.

Strategy: `table.OPERATIONS` names them all; a new operation is a pair of functions and a row there.
"""
