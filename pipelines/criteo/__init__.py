"""Click prediction on Criteo display advertising rows: generate, parse, prepare, train, report."""
