-- How much does each model think, and write after thinking, turn by turn? Do its think blocks have the structure?
-- SET VARIABLE rollout_set = 'name' for one rollout set; SET VARIABLE experiment = 'name' for one evaluation.
SELECT
    r.origin,
    r.made_for,
    r.model,
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
    ON t.rollout_id = r.rollout_id AND t.origin = r.origin AND t.made_for = r.made_for
WHERE
    (getvariable('rollout_set') IS NULL OR r.rollout_set = getvariable('rollout_set'))
    AND (getvariable('experiment') IS NULL OR r.experiment = getvariable('experiment'))
GROUP BY ALL
ORDER BY r.origin DESC, r.made_for ASC, r.model ASC, r.decoding ASC, t.turn ASC;
