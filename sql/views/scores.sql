-- One row a scored rollout; origin, rollout_set and experiment as in rollouts.
CREATE OR REPLACE VIEW scores AS
SELECT
    *,
    'set' AS origin
FROM scored_rollouts.scores
UNION ALL BY NAME
SELECT
    *,
    'eval' AS origin
FROM eval_metrics.scores;
