"""What the sweeper does in bounded steps: what is due, move tasks, snapshots, trimming."""
