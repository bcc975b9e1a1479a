-- One row per rollout that reinforcement trained on, with its reward and advantage.
CREATE OR REPLACE VIEW rl_samples AS
SELECT * FROM rl_checkpoint.rl_samples;
