-- Which checkpoints trained on a verdict that flipped since, and with what share of their label tokens or reward?
SELECT
    experiment,
    checkpoint_id,
    role,
    seed,
    step,
    final,
    via_checkpoint_id,
    rollouts,
    n_rows,
    share,
    share_of
FROM tainted
WHERE kind = 'checkpoint'
ORDER BY experiment, role, seed, step, via_checkpoint_id;
