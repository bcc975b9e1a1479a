-- The files of an experiment's written reports, relative to the lake's root.
SELECT
    kind,
    path,
    sha256
FROM reports
WHERE experiment = getvariable('experiment')
ORDER BY kind;
