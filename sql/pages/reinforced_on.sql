-- How reinforcement used a rollout of its own: step, reward and advantage, with the value of each reward function.
SELECT
    s.seed,
    s.step,
    s.reward,
    s.advantage,
    s.parsed,
    s.solved,
    s.policy_tokens,
    s.read_tokens,
    list({ 'function': w.function, 'weight': w.weight, 'value': w.value } ORDER BY w.function)
    FILTER (w.function IS NOT NULL) AS rewards
FROM rl_samples AS s
LEFT JOIN rewards AS w ON s.experiment = w.experiment AND s.rollout_id = w.rollout_id AND w.applied
WHERE s.rollout_id = getvariable('rollout') AND s.experiment = getvariable('made_for')
GROUP BY ALL;
