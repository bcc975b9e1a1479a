-- The checkpoints of an experiment, each with the rows, turns and rollouts of the data version that it was trained on.
WITH behind AS (
    SELECT
        version,
        count(*) AS train_rows,
        count(DISTINCT rollout_id) AS rollouts
    FROM upweighted_dataset.dataset_rows_history
    WHERE
        split = 'train'
        AND version IN (
            SELECT c.dataset_version FROM checkpoints AS c
            WHERE c.experiment = getvariable('experiment')
        )
    GROUP BY version
)

SELECT
    c.checkpoint_id,
    c.role,
    c.seed,
    c.step,
    c.final,
    c.method,
    c.dtype,
    c.parent_id,
    c.dataset_version,
    c.train_loss,
    c.val_loss,
    c.wall_seconds,
    b.train_rows,
    b.rollouts
FROM checkpoints AS c
LEFT JOIN behind AS b ON c.dataset_version = b.version
WHERE c.experiment = getvariable('experiment')
ORDER BY list_position(['base', 'sft', 'rl'], c.role), c.seed, c.step;
