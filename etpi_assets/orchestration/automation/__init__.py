"""A sensor and a schedule that start runs without a person. Both are off until someone switches them on.

`conditions`: cheap assets follow their inputs. `schedule`: experiments at fixed times.
"""
