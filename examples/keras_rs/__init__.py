"""The ten examples of keras-rs 0.4, rewritten for made-up data, without and with privacy."""
