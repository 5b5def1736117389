"""A character model of a text, trained from scratch: windows of the text are the examples."""
