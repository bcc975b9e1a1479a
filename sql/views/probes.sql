-- One row per probe of a served checkpoint.
CREATE OR REPLACE VIEW probes AS
SELECT * FROM serving_probe.probes;
