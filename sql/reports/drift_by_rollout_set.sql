-- Does every prompt extend the turn before it, id for id? If not, what does the server's rendering change?
-- SET VARIABLE rollout_set = 'name' for one rollout set.
SELECT
    t.rollout_set,
    r.engine,
    r.teacher,
    count(*) AS turns,
    -- A length is null where the ids are null; testing the ids would read them all.
    count(*) FILTER (WHERE t.output_tokens IS NULL OR t.prompt_tokens IS NULL) AS without_ids,
    count(*) FILTER (WHERE t.turn > 0) AS later_turns,
    count(*) FILTER (WHERE t.turn > 0 AND t.prefix_turn = t.turn - 1) AS extend_the_last,
    count(t.drift_at) AS with_drift,
    -- The share of the prompt before the first difference.
    median(t.drift_at / t.prompt_tokens) AS kept_median,
    arg_min(t.drift ->> 'expected_text', (t.rollout_id, t.agent_id, t.turn))
    FILTER (WHERE t.drift_at IS NOT NULL) AS generated,
    arg_min(t.drift ->> 'found_text', (t.rollout_id, t.agent_id, t.turn))
    FILTER (WHERE t.drift_at IS NOT NULL) AS rendered
FROM turns AS t
INNER JOIN rollouts AS r ON t.rollout_id = r.rollout_id AND t.rollout_set = r.rollout_set
WHERE
    t.origin = 'set'
    AND (getvariable('rollout_set') IS NULL OR t.rollout_set = getvariable('rollout_set'))
GROUP BY ALL
ORDER BY t.rollout_set ASC;
