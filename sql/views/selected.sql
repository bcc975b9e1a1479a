-- One row per rollout selected for an experiment, with the rule that selected it.
CREATE OR REPLACE VIEW selected AS
SELECT * FROM selected_trajectories.selected;
