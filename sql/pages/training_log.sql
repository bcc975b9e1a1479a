-- The logged steps of trainings, for curves over steps. experiments: these only.
SELECT
    experiment,
    role,
    seed,
    step,
    loss,
    val_loss,
    reward,
    constant_groups,
    logprob_gap,
    entropy
FROM training_log
WHERE getvariable('experiments') IS NULL OR experiment IN (SELECT unnest(getvariable('experiments')::VARCHAR[]))
ORDER BY experiment, role, seed, step;
