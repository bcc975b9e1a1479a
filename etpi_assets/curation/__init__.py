"""Curation: from scored rollouts to merged, weighted training sequences."""
