"""Measurements of splitproxy itself. Each module runs by `python -m bench.NAME` and says what it measures."""
