-- One row per metric, decoding and two checkpoints of an evaluation: its change, paired by task, as reports show it.
CREATE OR REPLACE VIEW changes AS
SELECT * FROM experiment_report.changes;
