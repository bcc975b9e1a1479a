-- One row per suite, a set of tasks.
CREATE OR REPLACE VIEW suites AS
SELECT
    name AS suite,
    title,
    spec ->> '$.family' AS family,
    spec,
    sha256
FROM suite_spec.specs;
