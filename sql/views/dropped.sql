-- One row per rollout or turn that an experiment dropped at selection, pairs or dataset, with the reason.
CREATE OR REPLACE VIEW dropped AS
SELECT * FROM selected_trajectories.dropped
UNION ALL BY NAME
SELECT * FROM tito_pairs.dropped
UNION ALL BY NAME
SELECT * FROM upweighted_dataset.dropped;
