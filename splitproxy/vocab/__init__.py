"""Vocabularies: read from model and tokenizer files, turned into encoders whose ids are the engine's own."""
