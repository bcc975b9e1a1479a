"""Input keys and code versions, computed from specs, inputs and sources."""
