"""A server of a cluster: its ports and its part in it. See docs/cluster.md."""
