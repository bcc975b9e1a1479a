-- One row per written report.
CREATE OR REPLACE VIEW reports AS
SELECT * FROM experiment_report.reports
UNION ALL BY NAME
SELECT * FROM model_card.reports;
