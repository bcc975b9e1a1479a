-- One row per held-out task and extreme training rollout: how much the rollout raised or lowered the metric there, by
-- the weights of one checkpoint. The tasks are those that blame reads; the others judge a retraining.
CREATE OR REPLACE VIEW blame_tasks AS
SELECT * FROM blame.blame_tasks;
