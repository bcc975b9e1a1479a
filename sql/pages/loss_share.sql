-- The share of the loss of the first turns of an experiment's data set.
SELECT
    turn,
    count(*) AS n_rows,
    avg(weight * copies) AS mean_weight,
    sum(output_tokens) / sum(sum(output_tokens)) OVER () AS share_of_tokens,
    sum(weight * copies * output_tokens) / sum(sum(weight * copies * output_tokens)) OVER () AS share_of_loss
FROM dataset_rows
WHERE split = 'train' AND experiment = getvariable('experiment')
GROUP BY turn
ORDER BY turn;
