"""The asset `raw_rollouts`: engines of rollout sets, concurrent collection, the journal, templated rollouts."""
