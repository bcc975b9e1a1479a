-- One row per training row of every version of a data set, current or past, that the lake still has.
CREATE OR REPLACE VIEW dataset_history AS
WITH published AS (
    SELECT
        key AS experiment,
        version,
        max(created_at) AS created_at,
        bool_or(state = 'current') AS is_current
    FROM manifests
    WHERE asset = 'upweighted_dataset' AND state != 'blocked'
    GROUP BY key, version
)

SELECT
    p.experiment,
    h.*,
    p.created_at,
    p.is_current
FROM upweighted_dataset.dataset_rows_history AS h
INNER JOIN published AS p ON h.version = p.version;
