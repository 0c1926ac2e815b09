"""Compare engines, sweep batch sizes, and measure the cost of offloading, in fresh processes."""
