-- One row per training row: a pair with its weight and split.
CREATE OR REPLACE VIEW dataset_rows AS
SELECT * FROM upweighted_dataset.dataset_rows;
