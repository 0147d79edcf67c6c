"""The client's side: what its API says, and how it is answered in the words of that API."""
