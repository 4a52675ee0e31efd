"""Who sent a request to Queue Storage, and what it may do.

Strategy: `signature.Verifier` takes the request and picks the way: SharedKey (shared_key.py), a shared access signature
(sas.py) or a bearer token (bearer.py). Each gives one `Caller` (call.py).
"""
