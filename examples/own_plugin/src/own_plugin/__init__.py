"""Code of one's own for etpi."""
