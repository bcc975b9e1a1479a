-- One row per check outcome of every publication; state as in manifests.
CREATE OR REPLACE VIEW checks AS
SELECT * FROM lake.checks;
