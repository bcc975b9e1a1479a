-- One row per turn that reinforcement trained on, with the trainer's log-probability and entropy at each of its
-- output_ids, before the first update on the rollout; the importance ratio is exp(policy_logprobs - logprobs).
CREATE OR REPLACE VIEW rl_turns AS
WITH placed AS (
    SELECT
        t.experiment,
        t.rollout_id,
        t.agent_id,
        t.turn,
        t.output_ids,
        t.logprobs,
        -- rl_samples has the ids of a rollout's turns one after the other.
        coalesce(
            sum(len(t.output_ids)) OVER (
                PARTITION BY t.experiment, t.rollout_id
                ORDER BY t.agent_id, t.turn
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ),
            0
        )::BIGINT AS start_at,
        row_number() OVER (PARTITION BY t.experiment, t.rollout_id ORDER BY t.agent_id, t.turn) AS number
    FROM rl_checkpoint.turns AS t
)

SELECT
    p.experiment,
    p.rollout_id,
    p.agent_id,
    p.turn,
    p.output_ids,
    p.logprobs,
    s.task_id,
    s.seed,
    s.step,
    coalesce(s.turn_versions[p.number], s.version) AS version,
    coalesce(s.agent_advantages[list_position(s.agents, p.agent_id)], s.advantage) AS advantage,
    list_slice(s.policy_logprobs, p.start_at + 1, p.start_at + len(p.output_ids)) AS policy_logprobs,
    list_slice(s.entropies, p.start_at + 1, p.start_at + len(p.output_ids)) AS entropies,
    list_slice(s.teacher_logprobs, p.start_at + 1, p.start_at + len(p.output_ids)) AS teacher_logprobs
FROM placed AS p
INNER JOIN rl_checkpoint.rl_samples AS s ON p.experiment = s.experiment AND p.rollout_id = s.rollout_id
WHERE s.left_out IS NULL;
