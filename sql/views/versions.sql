-- One row per asset partition: the current version, and the newer blocked one if there is one.
CREATE OR REPLACE VIEW versions AS
SELECT
    asset,
    set,
    key,
    max(version) FILTER (state = 'current') AS version,
    max(version) FILTER (state = 'blocked') AS blocked_version,
    max(total_rows) FILTER (state = 'current') AS total_rows,
    max(created_at) FILTER (state = 'current') AS created_at
FROM lake.manifests
GROUP BY ALL;
