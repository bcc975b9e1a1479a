-- One row a rollout taken into an experiment, and the rule that took it.
CREATE OR REPLACE VIEW selected AS
SELECT * FROM selected_trajectories.selected;
