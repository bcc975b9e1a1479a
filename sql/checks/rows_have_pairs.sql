-- Training rows whose pair is missing from the lake, although both tables are current versions.
SELECT
    d.experiment,
    d.dataset_row_id,
    d.pair_id
FROM dataset_rows AS d
ANTI JOIN tito_pairs.pairs AS p ON d.experiment = p.experiment AND d.pair_id = p.pair_id;
