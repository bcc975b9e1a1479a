"""Tokenizers, one module or folder per vocabulary, and the chat templates that belong to them."""
