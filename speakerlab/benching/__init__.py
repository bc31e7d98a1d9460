"""How fast this machine is, and how near to that a model comes. No peers: see `benchmarks/`."""
