"""Who sent a request to SQS, and whether its queue's policy allows it.

Strategy: `signature.Verifier` gives the caller of a request. `authorize.authorized` checks a call against the queue's
policy (policy.py) before it goes to the engine; most calls need no such check.
"""
