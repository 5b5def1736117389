"""Sentence classification: text becomes tokens once, and a language model trains privately."""
