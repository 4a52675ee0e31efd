"""VeilMQ's own operations on SQS's port: what neither SQS nor its SDKs can say.

Strategy: the same JSON form and signature as SQS, with another target. docs/veil-protocol.md documents them.
"""
