"""Versions of the code behind an asset: computed from the sources, never listed by hand.

`source` reads one file, `codebase` follows references through all of them, `choices` says which of several
alternatives a spec selects, `selection` reads that from the specs.
"""
