"""Reverse proxy that lets one LLM engine read long prompts and another write the answers."""

from importlib.metadata import version

__version__ = version("splitproxy")
