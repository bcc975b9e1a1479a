-- One row a rollout that reinforcement learnt from, with its reward and advantage.
CREATE OR REPLACE VIEW rl_samples AS
SELECT * FROM rl_checkpoint.rl_samples;
