"""Plain NumPy references, written from the mathematics and not from the library."""
