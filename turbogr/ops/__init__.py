"""Operators on jagged tensors: one file an operator, with its name, its shapes and a plain reference beside it."""
