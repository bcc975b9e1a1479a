-- How do teacher, base and student compare on each metric, with n and 95 % intervals?
-- SET VARIABLE experiment = 'name' for one experiment; SET VARIABLE metric = 'plan_first' for one metric. The student
-- is the last trained checkpoint.
WITH wanted AS (
    SELECT
        *,
        printf('%.3f [%.3f, %.3f] n=%d', value, ci_low, ci_high, n) AS figure
    FROM metrics
    WHERE
        (getvariable('experiment') IS NULL OR experiment = getvariable('experiment'))
        AND (getvariable('metric') IS NULL OR metric = getvariable('metric'))
),

students AS (
    SELECT
        experiment,
        metric,
        decoding,
        seed,
        max(figure) FILTER (checkpoint_role = 'base') AS base,
        max(figure) FILTER (checkpoint_role = 'sft') AS sft,
        max(figure) FILTER (checkpoint_role = 'rl') AS rl,
        coalesce(max(value) FILTER (checkpoint_role = 'rl'), max(value) FILTER (checkpoint_role = 'sft'))
            AS student_value
    FROM wanted
    WHERE checkpoint_role != 'teacher'
    GROUP BY experiment, metric, decoding, seed
),

teachers AS (
    -- A teacher has one decoding, that of its rollout set; it is compared with every decoding of the student.
    SELECT
        experiment,
        metric,
        max(figure) AS teacher,
        max(value) AS teacher_value
    FROM wanted
    WHERE checkpoint_role = 'teacher'
    GROUP BY experiment, metric
)

SELECT
    s.experiment,
    s.metric,
    s.decoding,
    s.seed,
    t.teacher,
    s.base,
    s.sft,
    s.rl,
    s.student_value - t.teacher_value AS student_minus_teacher
FROM students AS s
LEFT JOIN teachers AS t ON s.experiment = t.experiment AND s.metric = t.metric
ORDER BY s.experiment, s.metric, s.decoding, s.seed NULLS FIRST;
