-- One row a reward function's word on a rollout of reinforcement: as training was told it (applied), and as the
-- function says it now.
CREATE OR REPLACE VIEW rewards AS
SELECT * FROM rl_checkpoint.rewards
UNION ALL BY NAME
SELECT * FROM rl_rewards.rewards;
