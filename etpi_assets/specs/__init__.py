"""Specs: the three nouns, read from TOML files."""
