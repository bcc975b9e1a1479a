-- One row per assistant turn, with whether its think block has the structure; origin and made_for as in rollouts.
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
