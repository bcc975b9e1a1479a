-- Trained checkpoints without training rows: the data version they were trained on is unknown or was pruned.
SELECT
    c.experiment,
    c.role,
    c.seed,
    c.checkpoint_id,
    c.dataset_version
FROM checkpoints AS c
ANTI JOIN lineage AS l ON c.checkpoint_id = l.checkpoint_id
WHERE c.role IN ('sft', 'rl');
