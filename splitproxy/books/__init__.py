"""Who has which slot, who waits for one, what is filled, and the session files on their way."""
