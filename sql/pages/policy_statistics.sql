-- The trainer's log-probability and entropy of each token that the policy wrote in a rollout of reinforcement: the
-- output ids of its turns, one after the other.
SELECT
    policy_logprobs,
    entropies
FROM rl_samples
WHERE rollout_id = getvariable('rollout') AND experiment = getvariable('made_for');
