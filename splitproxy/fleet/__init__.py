"""The engines as a whole: their health, the pairs that have proven themselves, and their slots."""
