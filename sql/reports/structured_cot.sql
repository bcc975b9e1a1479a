-- How much does each model think and say after it, turn by turn, and does its think block keep to the structure?
-- SET VARIABLE rollout_set = 'name' for one rollout set; SET VARIABLE experiment = 'name' for one evaluation.
SELECT
    r.origin,
    coalesce(r.rollout_set, r.experiment) AS made_for,
    coalesce(r.checkpoint_role, r.teacher) AS model,
    r.decoding,
    t.turn,
    count(*) AS n,
    avg(t.adheres::INTEGER) AS adherence,
    avg(t.think_tokens) AS think_mean,
    median(t.think_tokens) AS think_median,
    quantile_cont(t.think_tokens, 0.9) AS think_p90,
    avg(t.post_think_tokens) AS after_mean,
    median(t.post_think_tokens) AS after_median
FROM turn_scores AS t
INNER JOIN rollouts AS r
    ON
        t.rollout_id = r.rollout_id
        AND t.origin = r.origin
        AND coalesce(t.rollout_set, t.experiment) = coalesce(r.rollout_set, r.experiment)
WHERE
    (getvariable('rollout_set') IS NULL OR r.rollout_set = getvariable('rollout_set'))
    AND (getvariable('experiment') IS NULL OR r.experiment = getvariable('experiment'))
GROUP BY ALL
ORDER BY r.origin DESC, made_for ASC, model ASC, r.decoding ASC, t.turn ASC;
