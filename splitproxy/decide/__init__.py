"""Decisions about prompts, and what they rest on: plain functions of values."""
