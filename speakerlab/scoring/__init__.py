"""Embeddings and trial lists in; scores, error rates with intervals, and a report out."""
