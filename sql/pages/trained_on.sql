-- The data sets that have rows of a rollout, with their weighted tokens and the checkpoints trained on them.
WITH mine AS (
    SELECT
        experiment,
        count(*) AS n_rows,
        count(*) FILTER (split = 'train') AS train_rows,
        sum(weight * copies * output_tokens) FILTER (split = 'train') AS loss_weight
    FROM dataset_rows
    WHERE rollout_id = getvariable('rollout')
    GROUP BY experiment
),

trained AS (
    SELECT
        c.experiment,
        list({ 'checkpoint_id': c.checkpoint_id, 'role': c.role, 'seed': c.seed, 'step': c.step }) AS checkpoints
    FROM checkpoints AS c
    INNER JOIN versions AS v
        ON c.experiment = v.key AND v.asset = 'upweighted_dataset' AND c.dataset_version = v.version
    GROUP BY c.experiment
)

SELECT
    m.experiment,
    m.n_rows,
    m.train_rows,
    m.loss_weight,
    c.checkpoints
FROM mine AS m
LEFT JOIN trained AS c ON m.experiment = c.experiment
ORDER BY m.experiment;
