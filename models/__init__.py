"""Models of the published experiments, ready for private training."""
