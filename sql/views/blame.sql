-- One row per training row and checkpoint: how much it raised (above 0) or lowered (below 0) a held-out metric.
-- influences has a value for each token of the row's output, nats of its loss per unit of a move of the weights.
-- harm is the sum of those below 0; checkpoint_id and dataset_row_id are those of lineage; flipped: a later judge
-- reversed the rollout's verdict, and `etpi taint --keep` did not accept it.
CREATE OR REPLACE VIEW blame AS
WITH formats AS (
    SELECT
        name,
        spec ->> '$.format' AS format
    FROM rollout_set_spec.specs
)

SELECT
    b.*,
    coalesce(list_sum(list_filter(b.influences, LAMBDA x: x < 0)), 0) AS harm, -- noqa: RF02
    c.checkpoint_id,
    c.dataset_version,
    d.sequence_id,
    d.span_start,
    d.task_id,
    d.repo,
    d.teacher,
    d.weight,
    d.copies,
    r.rollout_set,
    r.sampler,
    r.source,
    f.format AS importer,
    r.exit_status,
    r.outcome ->> '$.details.verdict_trust' AS verdict_trust,
    b.rollout_id IN (
        SELECT v.rollout_id FROM flips AS v
        WHERE v.kept IS NULL
    ) AS flipped
FROM blame.blame AS b
INNER JOIN sft_checkpoint.checkpoints AS c ON b.experiment = c.experiment AND b.seed = c.seed AND b.step = c.step
INNER JOIN upweighted_dataset.dataset_rows_history AS d
    ON c.dataset_version = d.version AND b.dataset_row_id = d.dataset_row_id
LEFT JOIN raw_rollouts.rollouts AS r ON b.rollout_id = r.rollout_id
LEFT JOIN formats AS f ON r.rollout_set = f.name;
