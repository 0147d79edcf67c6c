"""One adapter for each kind of engine: the only files that know an engine's paths and fields."""
