-- From which step on do agents lose the state of a task? For held-out rollouts of running_sum, whose tasks count their
-- own steps: for each depth k, the share of rollouts with at least k steps that were right up to step k, and the share
-- of tasks with exactly k steps that were solved.
WITH counted AS (
    SELECT
        experiment,
        checkpoint_role,
        seed,
        decoding,
        cast(json_extract_string(outcome, '$.details.depth') AS INTEGER) AS depth,
        cast(json_extract_string(outcome, '$.details.right') AS INTEGER) AS steps_right,
        cast(json_extract_string(outcome, '$.reward') AS DOUBLE) AS reward
    FROM rollouts
    WHERE origin = 'eval' AND json_extract_string(outcome, '$.details.depth') IS NOT NULL
),

depths AS (
    SELECT DISTINCT depth AS k FROM counted
)

SELECT
    counted.experiment,
    counted.checkpoint_role,
    counted.seed,
    counted.decoding,
    depths.k,
    count(*) AS n,
    avg(cast(counted.steps_right >= depths.k AS DOUBLE)) AS right_up_to_k,
    count(*) FILTER (WHERE counted.depth = depths.k) AS n_of_depth_k,
    avg(counted.reward) FILTER (WHERE counted.depth = depths.k) AS solved
FROM counted
INNER JOIN depths ON counted.depth >= depths.k
GROUP BY ALL
ORDER BY counted.experiment, counted.checkpoint_role, counted.seed, counted.decoding, depths.k;
