"""Engines that are started here."""
