-- One row an assistant turn, held against a structure of its think block; origin and made_for are its rollout's.
CREATE OR REPLACE VIEW turn_scores AS
SELECT
    *,
    coalesce(rollout_set, experiment) AS made_for
FROM (
    SELECT
        *,
        'set' AS origin
    FROM scored_rollouts.turn_scores
    UNION ALL BY NAME
    SELECT
        *,
        'eval' AS origin
    FROM eval_metrics.turn_scores
) AS made;
