"""Commands on queues, topics and subscriptions, and the plans of queues."""
