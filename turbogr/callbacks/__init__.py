"""Callbacks: each is one technique or one report, toggled by one entry in a recipe."""
