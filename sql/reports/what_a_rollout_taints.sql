-- Which experiments and checkpoints does this bad rollout taint, and how much of their loss was it?
-- SET VARIABLE rollout = 'rollout_id'; the first one that trained anything by default.
WITH shares AS (
    SELECT
        checkpoint_id,
        experiment,
        role,
        seed,
        step,
        final,
        via_checkpoint_id,
        rollout_id,
        count(*) AS n_rows,
        sum(weight * copies * output_tokens) AS loss_weight
    FROM lineage
    GROUP BY ALL
),

compared AS (
    SELECT
        *,
        loss_weight / sum(loss_weight) OVER (PARTITION BY checkpoint_id, experiment, via_checkpoint_id)
            AS share_of_loss
    FROM shares
)

SELECT
    rollout_id,
    experiment,
    checkpoint_id,
    role,
    seed,
    step,
    final,
    via_checkpoint_id,
    n_rows,
    share_of_loss
FROM compared
WHERE rollout_id = coalesce(getvariable('rollout'), (SELECT min(l.rollout_id) FROM lineage AS l))
ORDER BY experiment, role, seed, step, via_checkpoint_id;
