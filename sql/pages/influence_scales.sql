-- The influence of a token that pages shade darkest, of each experiment: nine rows in ten have no stronger token.
SELECT
    experiment,
    quantile_cont(list_max(list_transform(influences, LAMBDA x: abs(x))), 0.9) AS largest
FROM blame
GROUP BY experiment;
