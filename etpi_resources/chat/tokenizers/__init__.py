"""Tokenizers: where each vocabulary comes from and how it becomes a `transformers` fast tokenizer.

Belongs here: one module or folder a vocabulary. Does not belong here: conversations as ids (`chat_format`).
"""
