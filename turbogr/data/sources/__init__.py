"""Readers of raw logs, one file a source; each gives one table of typed events in reading order."""
