"""Scripted policies: teachers without a model. One module a suite family, each a function from a request to a text."""
