"""Embedded worlds of the lab, which specs name through the entry points `etpi.families`."""
