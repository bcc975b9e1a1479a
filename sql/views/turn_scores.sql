-- One row an assistant turn, held against a structure of its think block; origin and set are its rollout's.
CREATE OR REPLACE VIEW turn_scores AS
SELECT
    *,
    'set' AS origin
FROM scored_rollouts.turn_scores
UNION ALL BY NAME
SELECT
    *,
    'eval' AS origin
FROM eval_metrics.turn_scores;
