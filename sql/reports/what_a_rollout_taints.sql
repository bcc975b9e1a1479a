-- Which experiments and checkpoints were trained on this bad rollout, and what share of their loss did it have?
-- SET VARIABLE rollout = 'rollout_id'; the default is the first rollout that any checkpoint was trained on. Attempts of
-- reinforcement count with the size of their advantage, whose sign says whether they are to become likelier.
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
        sum(abs(weight) * copies * output_tokens) AS loss_weight
    FROM lineage
    GROUP BY ALL
),

compared AS (
    SELECT
        *,
        loss_weight / nullif(sum(loss_weight) OVER (PARTITION BY checkpoint_id, experiment, via_checkpoint_id), 0)
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
