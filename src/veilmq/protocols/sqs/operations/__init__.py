"""The operations of SQS: inputs to commands, outcomes to results, by noun.

Strategy: `table.OPERATIONS` names them all; a new operation is a pair of functions and a row there.
"""
