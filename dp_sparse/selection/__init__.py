"""Which embedding rows a step may touch. Nothing here imports Keras."""
