"""The verifier's reward of a rollout (`verdict`), and the reward functions of reinforcement learning.

`functions` registers every reward function by name and version; it and `terminal` define them.
"""
