"""What the jobs on sequences share: examples, the learning rate, the run of a next-item model."""
