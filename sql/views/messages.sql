-- One row per captured chat message; origin, rollout_set and experiment as in rollouts.
CREATE OR REPLACE VIEW messages AS
SELECT
    *,
    'set' AS origin
FROM raw_rollouts.messages
UNION ALL BY NAME
SELECT
    *,
    'eval' AS origin
FROM eval_rollouts.messages
UNION ALL BY NAME
SELECT
    *,
    'rl' AS origin
FROM rl_checkpoint.messages;
