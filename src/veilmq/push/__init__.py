"""HTTP delivery of subscriptions: what is published to a topic reaches the endpoints of its push subscriptions.

Strategy: a copy to push is a message in the subscription's hidden queue, and a push is a lease of it: delivered means
deleted, failed means extended until the next attempt is due. So nothing here has a state that a restart could lose; the
room only sends, and the engine keeps the rest. Source: docs/mns.md, "Pushes".
"""
