"""Loads, their measures, and what people see of them in the terminal."""
