-- One row an outcome of a check, of every publication; state as in manifests.
CREATE OR REPLACE VIEW checks AS
SELECT * FROM lake.checks;
