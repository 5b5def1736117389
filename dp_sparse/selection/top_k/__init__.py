"""Rows chosen before training: counts, noise, the top k, and the price of it all."""
