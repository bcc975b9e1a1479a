"""Rewards: the verifier's word on a rollout (`verdict`), and the functions that reinforcement is driven by.

`functions` knows every reward function by name and version; `terminal`, `unhardened` and `tools` hold them.
"""
