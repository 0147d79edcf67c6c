"""Text to token ids, as the engine makes them."""
