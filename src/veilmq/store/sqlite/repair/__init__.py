"""`veilmq check --repair`: what can be had of a damaged data directory, in a new one."""
