"""The pages of `etpi view`: a module for each kind, whose functions turn a request into a template's values."""
