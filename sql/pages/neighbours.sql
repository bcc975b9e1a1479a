-- The rollouts before and after one, by task, seed and sample, among those of its set, or of its experiment, checkpoint
-- and decoding.
WITH beside AS (
    SELECT
        rollout_id,
        lag(rollout_id) OVER in_order AS before,
        lead(rollout_id) OVER in_order AS following,
        row_number() OVER in_order AS place,
        count(*) OVER () AS n
    FROM rollouts
    WHERE
        origin = getvariable('origin')
        AND coalesce(rollout_set, experiment) = getvariable('made_for')
        AND checkpoint_role IS NOT DISTINCT FROM getvariable('role')
        AND decoding IS NOT DISTINCT FROM getvariable('decoding')
    WINDOW in_order AS (ORDER BY task_id, seed, sample, rollout_id)
)

SELECT
    before,
    following,
    place,
    n
FROM beside
WHERE rollout_id = getvariable('rollout');
