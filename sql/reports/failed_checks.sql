-- Which checks fail now, what do they report, and which of them block everything downstream?
SELECT
    asset,
    set,
    key,
    state,
    check_name,
    blocking,
    message,
    figures,
    version,
    created_at
FROM checks
WHERE NOT passed AND state IN ('current', 'blocked')
ORDER BY blocking DESC, created_at DESC, asset ASC, key ASC, check_name ASC;
