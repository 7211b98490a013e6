"""Speed and memory: ours against non-private training and against the peers."""
