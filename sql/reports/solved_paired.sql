-- Which share of the tasks do an earlier and a later checkpoint solve, paired by task, and how much do they think?
-- SET VARIABLE experiment = 'name' for one experiment. The figures are those of the report; paired_by_metric has
-- them for every metric. think_ratio is think tokens per turn, before / after.
SELECT
    s.experiment,
    s.decoding,
    s.before,
    s.after,
    s.tasks,
    s.value_before AS solved_before,
    s.value_after AS solved_after,
    s.difference,
    s.ci_low,
    s.ci_high,
    t.value_before AS think_before,
    t.value_after AS think_after,
    t.value_before / nullif(t.value_after, 0) AS think_ratio
FROM changes AS s
LEFT JOIN changes AS t
    ON
        s.experiment = t.experiment
        AND s.decoding = t.decoding
        AND s.before = t.before
        AND s.after = t.after
        AND t.metric = 'think_tokens_per_turn'
WHERE
    s.metric = 'solved'
    AND (getvariable('experiment') IS NULL OR s.experiment = getvariable('experiment'))
ORDER BY
    s.experiment ASC, s.decoding ASC, list_position(['base', 'sft', 'rl'], s.before) ASC,
    list_position(['base', 'sft', 'rl'], s.after) ASC;
