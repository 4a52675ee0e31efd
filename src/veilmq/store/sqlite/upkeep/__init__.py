"""What the sweeper does in bounded steps: ended leases and delays, move tasks, snapshots, trimming."""
