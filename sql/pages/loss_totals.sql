-- The loss of each experiment's data set as weighted tokens, and the highest weight of a token.
SELECT
    experiment,
    sum(weight * copies * output_tokens) FILTER (split = 'train') AS loss_weight,
    max(weight * copies) AS highest_weight
FROM dataset_rows
GROUP BY experiment;
