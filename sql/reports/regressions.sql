-- Which tasks did an earlier checkpoint solve and a later one lose, and which did it gain?
-- SET VARIABLE experiment = 'name' for one experiment; SET VARIABLE decoding = 'greedy' for one decoding. One row per
-- task whose solved share, averaged over samples and seeds, differs; the largest losses first. rollout_before and
-- rollout_after are rollouts to compare: a solved and a failed one. Rollouts with infrastructure errors do not count.
WITH judged AS (
    SELECT
        r.experiment,
        r.decoding,
        r.task_id,
        r.checkpoint_role,
        list_position(['base', 'sft', 'rl'], r.checkpoint_role) AS place,
        avg((s.reward = 1)::INTEGER) AS solved,
        count(*) AS rollouts,
        min(r.rollout_id) FILTER (s.reward = 1) AS one_solved,
        min(r.rollout_id) FILTER (s.reward != 1) AS one_failed,
        min_by(s.verdict, r.rollout_id) FILTER (s.reward != 1) AS verdict,
        min_by(r.exit_status, r.rollout_id) FILTER (s.reward != 1) AS exit_status,
        any_value(r.repo) AS repo,
        any_value(r.suite) AS suite
    FROM rollouts AS r
    INNER JOIN scores AS s ON r.experiment = s.experiment AND r.rollout_id = s.rollout_id
    WHERE
        r.origin = 'eval'
        AND s.origin = 'eval'
        AND s.reward IS NOT NULL
        AND NOT s.infrastructure_error
        AND (getvariable('experiment') IS NULL OR r.experiment = getvariable('experiment'))
        AND (getvariable('decoding') IS NULL OR r.decoding = getvariable('decoding'))
    GROUP BY r.experiment, r.decoding, r.task_id, r.checkpoint_role
),

paired AS (
    SELECT
        earlier.experiment,
        earlier.decoding,
        earlier.checkpoint_role AS before,
        later.checkpoint_role AS after,
        earlier.place,
        later.place AS later_place,
        CASE WHEN later.solved < earlier.solved THEN 'lost' ELSE 'gained' END AS change,
        earlier.task_id,
        earlier.repo,
        earlier.suite,
        earlier.solved AS solved_before,
        later.solved AS solved_after,
        earlier.rollouts AS rollouts_before,
        later.rollouts AS rollouts_after,
        CASE WHEN later.solved < earlier.solved THEN earlier.one_solved ELSE earlier.one_failed END AS rollout_before,
        CASE WHEN later.solved < earlier.solved THEN later.one_failed ELSE later.one_solved END AS rollout_after,
        -- How the failing side of the pair failed.
        CASE WHEN later.solved < earlier.solved THEN later.verdict ELSE earlier.verdict END AS failed_verdict,
        CASE WHEN later.solved < earlier.solved THEN later.exit_status ELSE earlier.exit_status END AS failed_exit
    FROM judged AS earlier
    INNER JOIN judged AS later
        ON
            earlier.experiment = later.experiment
            AND earlier.decoding = later.decoding
            AND earlier.task_id = later.task_id
            AND earlier.place < later.place
            AND earlier.solved != later.solved
)

SELECT
    p.experiment,
    p.decoding,
    p.before,
    p.after,
    p.change,
    p.task_id,
    p.repo,
    p.solved_before,
    p.solved_after,
    p.rollouts_before,
    p.rollouts_after,
    p.rollout_before,
    p.rollout_after,
    p.failed_verdict,
    p.failed_exit,
    t.instruction
FROM paired AS p
LEFT JOIN tasks AS t ON p.suite = t.suite AND p.task_id = t.task_id
ORDER BY
    p.experiment ASC,
    p.decoding ASC,
    p.place ASC,
    p.later_place ASC,
    p.solved_after - p.solved_before ASC,
    p.task_id ASC;
