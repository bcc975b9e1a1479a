-- How does each headline metric differ between an earlier and a later checkpoint, paired by task?
-- SET VARIABLE experiment = 'name' for one experiment. The figures are those of the report: values pooled over the
-- tasks that both were evaluated on, Newcombe's 95 % interval of the difference with each task against itself, the
-- tasks whose value rose and fell, the two-sided exact sign test of these counts, and the report's word for it.
SELECT
    experiment,
    metric,
    decoding,
    before,
    after,
    tasks,
    value_before,
    value_after,
    difference,
    ci_low,
    ci_high,
    higher,
    lower,
    sign_p,
    word
FROM changes
WHERE
    metric != 'think_tokens_per_turn'
    AND (getvariable('experiment') IS NULL OR experiment = getvariable('experiment'))
ORDER BY
    experiment ASC, metric ASC, decoding ASC, list_position(['base', 'sft', 'rl'], before) ASC,
    list_position(['base', 'sft', 'rl'], after) ASC;
