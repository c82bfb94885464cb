"""Embedding tables and the row optimizers that update only the rows a batch touched."""
