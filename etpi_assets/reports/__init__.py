"""Reports: what people read."""
