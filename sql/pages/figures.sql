-- The pooled figures of each experiment's metrics: base, student (the last trained role) and teacher, side by side, and
-- the change paired by task, as the report has it.
WITH pooled AS (
    SELECT *
    FROM metrics
    WHERE seed IS NULL AND (getvariable('experiment') IS NULL OR experiment = getvariable('experiment'))
),

decodings AS (
    SELECT DISTINCT
        experiment,
        decoding
    FROM pooled
    WHERE checkpoint_role != 'teacher'
),

of_teacher AS (
    SELECT
        experiment,
        metric,
        any_value(value) AS teacher
    FROM pooled
    WHERE checkpoint_role = 'teacher'
    GROUP BY ALL
),

placed AS (
    SELECT
        p.experiment,
        p.decoding,
        p.metric,
        max(CASE p.checkpoint_role WHEN 'sft' THEN 1 WHEN 'rl' THEN 2 END)
            OVER (PARTITION BY p.experiment, p.decoding) AS last_place,
        CASE p.checkpoint_role WHEN 'base' THEN 0 WHEN 'sft' THEN 1 WHEN 'rl' THEN 2 END AS place,
        p.checkpoint_role,
        p.value,
        p.n,
        p.unit,
        p.ci_low,
        p.ci_high,
        p.excluded
    FROM pooled AS p
    INNER JOIN decodings AS d ON p.experiment = d.experiment AND p.decoding = d.decoding
    WHERE p.checkpoint_role != 'teacher'
),

beside AS (
    SELECT
        p.experiment,
        p.decoding,
        p.metric,
        any_value(p.checkpoint_role) FILTER (p.place = p.last_place) AS student_role,
        any_value(p.unit) AS unit,
        any_value(p.value) FILTER (p.place = 0) AS base,
        any_value(p.n) FILTER (p.place = 0) AS base_n,
        any_value(p.ci_low) FILTER (p.place = 0) AS base_low,
        any_value(p.ci_high) FILTER (p.place = 0) AS base_high,
        any_value(p.value) FILTER (p.place = p.last_place) AS student,
        any_value(p.n) FILTER (p.place = p.last_place) AS student_n,
        any_value(p.ci_low) FILTER (p.place = p.last_place) AS student_low,
        any_value(p.ci_high) FILTER (p.place = p.last_place) AS student_high,
        any_value(p.excluded) FILTER (p.place = p.last_place) AS excluded,
        any_value(t.teacher) AS teacher
    FROM placed AS p
    LEFT JOIN of_teacher AS t ON p.experiment = t.experiment AND p.metric = t.metric
    GROUP BY p.experiment, p.decoding, p.metric
)

SELECT
    b.*,
    c.difference,
    c.ci_low AS change_low,
    c.ci_high AS change_high,
    c.word
FROM beside AS b
LEFT JOIN changes AS c
    ON
        b.experiment = c.experiment
        AND b.decoding = c.decoding
        AND b.metric = c.metric
        AND c.before = 'base'
        AND b.student_role = c.after
ORDER BY b.experiment, b.decoding, b.metric;
