-- One row per agent of a rollout; origin, rollout_set and experiment as in rollouts.
CREATE OR REPLACE VIEW agents AS
SELECT
    *,
    'set' AS origin
FROM raw_rollouts.agents
UNION ALL BY NAME
SELECT
    *,
    'eval' AS origin
FROM eval_rollouts.agents
UNION ALL BY NAME
SELECT
    *,
    'rl' AS origin
FROM rl_checkpoint.agents;
