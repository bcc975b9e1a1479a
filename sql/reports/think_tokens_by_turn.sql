-- How many tokens does each model think, turn by turn, and how many other tokens does it write?
-- SET VARIABLE rollout_set = 'name' for one rollout set; SET VARIABLE experiment = 'name' for one evaluation.
SELECT
    r.origin,
    r.made_for,
    r.model,
    r.decoding,
    t.turn,
    count(*) AS n,
    count(t.think_tokens) AS n_known,
    avg(t.think_tokens) AS think_mean,
    median(t.think_tokens) AS think_median,
    avg(t.output_tokens - t.think_tokens) AS other_mean,
    avg((t.think_tokens > 0)::INTEGER) AS share_thinking
FROM turns AS t
INNER JOIN rollouts AS r
    ON t.rollout_id = r.rollout_id AND t.origin = r.origin AND t.made_for = r.made_for
WHERE
    (getvariable('rollout_set') IS NULL OR r.rollout_set = getvariable('rollout_set'))
    AND (getvariable('experiment') IS NULL OR r.experiment = getvariable('experiment'))
GROUP BY ALL
ORDER BY r.origin DESC, r.made_for ASC, r.model ASC, r.decoding ASC, t.turn ASC;
