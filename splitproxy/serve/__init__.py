"""A request on its way, the HTTP server, and everything put together."""
