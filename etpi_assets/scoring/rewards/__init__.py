"""The verifier's reward of a rollout (`verdict`), and the reward functions of reinforcement learning.

`functions` registers every reward function by name and version; `terminal`, `unhardened` and `tools` define them.
"""
