-- Training rows of pairs that are not in the lake, though both are of the versions in force.
SELECT
    d.experiment,
    d.dataset_row_id,
    d.pair_id
FROM dataset_rows AS d
ANTI JOIN tito_pairs.pairs AS p ON d.experiment = p.experiment AND d.pair_id = p.pair_id;
