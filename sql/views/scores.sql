-- One row per scored rollout; origin, made_for, rollout_set and experiment as in rollouts.
CREATE OR REPLACE VIEW scores AS
SELECT
    *,
    coalesce(rollout_set, experiment) AS made_for
FROM (
    SELECT
        *,
        'set' AS origin
    FROM scored_rollouts.scores
    UNION ALL BY NAME
    SELECT
        *,
        'eval' AS origin
    FROM eval_metrics.scores
) AS made;
