"""Image classification: load labelled images, train a classifier privately, report."""
