-- One row per merged training sequence.
CREATE OR REPLACE VIEW sequences AS
SELECT * FROM upweighted_dataset.sequences;
