-- What share of an experiment's training loss does each turn have, with weights and copies?
-- SET VARIABLE experiment = 'name' for one experiment.
SELECT
    experiment,
    turn,
    count(*) AS n_rows,
    sum(output_tokens)::BIGINT AS output_tokens,
    avg(weight * copies) AS mean_weight,
    sum(output_tokens) / sum(sum(output_tokens)) OVER (PARTITION BY experiment) AS share_unweighted,
    sum(weight * copies * output_tokens)
    / sum(sum(weight * copies * output_tokens)) OVER (PARTITION BY experiment) AS share_of_loss
FROM dataset_rows
WHERE split = 'train' AND (getvariable('experiment') IS NULL OR experiment = getvariable('experiment'))
GROUP BY experiment, turn
ORDER BY experiment, turn;
