"""Commands on queues, topics and subscriptions, and the queues' plans."""
