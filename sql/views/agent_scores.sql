-- One row per scored agent; origin, rollout_set and experiment as in rollouts.
CREATE OR REPLACE VIEW agent_scores AS
SELECT
    *,
    'set' AS origin
FROM scored_rollouts.agent_scores
UNION ALL BY NAME
SELECT
    *,
    'eval' AS origin
FROM eval_metrics.agent_scores;
