"""Conversations made without a model or a real sandbox, in bulk: what a tiny base model grows up on."""
