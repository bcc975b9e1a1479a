"""The reference pages in docs/reference, generated from the code: `python -m etpi.reference` rewrites them."""
