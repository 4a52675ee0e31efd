"""What somebody has set: queues, topics and their subscriptions, plans of first leases, keys and their grants."""
