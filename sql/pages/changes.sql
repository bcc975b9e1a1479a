-- The held-out tasks on which base and student differ: lost (the base solved it, the student did not) first, then
-- gained, by decoding and seeds. One row per pair of rollouts; a base without a seed is paired with every seed.
WITH judged AS (
    SELECT
        r.rollout_id,
        r.task_id,
        r.repo,
        r.checkpoint_role,
        list_position(['base', 'sft', 'rl'], r.checkpoint_role) AS place,
        r.decoding,
        r.seed,
        r.sample_seed,
        r.sample,
        s.verdict,
        s.reward,
        s.exit_status
    FROM rollouts AS r
    INNER JOIN scores AS s ON r.rollout_id = s.rollout_id AND r.experiment = s.experiment
    WHERE
        r.origin = 'eval'
        AND s.origin = 'eval'
        AND r.experiment = getvariable('experiment')
        AND s.experiment = getvariable('experiment')
        AND s.reward IS NOT NULL
        AND NOT s.infrastructure_error
),

student AS (
    SELECT * FROM judged
    WHERE place = (SELECT max(j.place) FROM judged AS j) AND place > 1
)

SELECT
    b.task_id,
    b.repo,
    b.decoding,
    s.seed,
    s.sample_seed,
    s.checkpoint_role AS student_role,
    CASE
        WHEN b.reward = 1 AND s.reward < 1 THEN 'lost'
        WHEN b.reward < 1 AND s.reward = 1 THEN 'gained'
        WHEN b.reward = 1 THEN 'both solved' ELSE 'neither solved'
    END AS change,
    b.rollout_id AS base_rollout,
    s.rollout_id AS student_rollout,
    b.verdict AS base_verdict,
    s.verdict AS student_verdict,
    b.exit_status AS base_exit,
    s.exit_status AS student_exit
FROM judged AS b
INNER JOIN student AS s
    ON
        b.task_id = s.task_id
        AND b.decoding = s.decoding
        AND b.sample = s.sample
        AND b.sample_seed IS NOT DISTINCT FROM s.sample_seed
WHERE b.place = 1
ORDER BY
    list_position(['lost', 'gained', 'neither solved', 'both solved'], change) ASC,
    b.decoding ASC, b.task_id ASC, s.seed ASC, s.sample_seed ASC;
