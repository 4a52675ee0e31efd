"""One message: content and ids, states, the receipt handle of a lease, and what a client reports of its work."""
