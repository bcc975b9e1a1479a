"""The agent loop with real sandboxes, the real tokenizer and scripted engines: rounds, ids, budgets, ways to end."""

from __future__ import annotations

import pytest

from etpi_assets.agent.actions import NO_ACTION
from etpi_assets.agent.loop import RolloutJob, RolloutRuntime, rollout_id, run_rollout
from etpi_assets.rollouts.teachers import null_policy, reference_policy
from etpi_assets.specs.rollout_set import AgentSection, GrammarSection
from etpi_assets.tasks.family import Task
from etpi_assets.trajectories.tables import to_tables
from etpi_assets.worlds.coop_tiny_shared import CoopTinyShared
from etpi_resources.chat.format import load_chat_format
from etpi_resources.chat.grammars import ThinkGrammar
from etpi_resources.engines import Request, Sampler
from etpi_resources.engines.scripted import ScriptedEngine
from etpi_resources.sandboxes import SandboxUnavailable
from tests.support.agent_loop import BOX, CHAT, IDENTITY, SUBMITS, TASK, Pair, bash, roll, script
from tests.support.rollouts import prompts_of


def test_every_prompt_extends_the_last_and_decodes_to_the_conversation():
    record = roll(script(agent1=[bash("ls"), bash("cat a.txt"), SUBMITS], agent2=[bash("false"), SUBMITS]))
    for agent in record.agents:
        for last, turn in zip(agent.turns, agent.turns[1:], strict=False):
            assert last.prompt_ids and last.output_ids and turn.prompt_ids
            assert last.output_ids[-1] == CHAT.end_id
            assert turn.prompt_ids[: len(last.prompt_ids) + len(last.output_ids)] == last.prompt_ids + last.output_ids
            assert turn.prompt_ids == last.prompt_ids + last.output_ids + CHAT.observation_ids(last.observation or "")
        chat = [{"role": m.role, "content": m.content} for m in agent.messages]
        asked = [m for m in chat if m["role"] != "assistant"]
        assert [m["role"] for m in asked] == ["system", "user"] + ["user"] * len(agent.turns)
        whole = CHAT.decode(agent.turns[-1].prompt_ids or [])
        assert all(m["content"] in whole for m in chat[: 2 * len(agent.turns)])
    assert [a.exit_status for a in record.agents] == ["Submitted", "Submitted"]
    assert [t.exit_code for t in record.agents[1].turns] == [1, 0]
    assert all(t.capture == "native" for a in record.agents for t in a.turns)


def test_outputs_decode_to_the_text_but_are_not_its_tokenisation():
    record = roll(script(agent1=[bash("cat dir/b.txt a.txt"), SUBMITS], agent2=[SUBMITS]))
    turns = [t for a in record.agents for t in a.turns]
    for turn in turns:
        assert CHAT.decode((turn.output_ids or [])[:-1]) == turn.content
        assert CHAT.tool_open_id in (turn.output_ids or [])
    assert any(turn.output_ids != [*CHAT.encode(turn.content), CHAT.end_id] for turn in turns)


def test_messages_of_a_round_are_read_in_that_round():
    send = "send_message {} <<'MSG'\nplan of {}\nMSG"
    record = roll(
        script(
            agent1=[bash(send.format("agent2", "agent1")), SUBMITS],
            agent2=[bash(send.format("agent1", "agent2")), SUBMITS],
        )
    )
    first, second = (agent.turns[0] for agent in record.agents)
    assert first.inbox == [{"from": "agent2", "message": "plan of agent2"}]
    assert second.inbox == [{"from": "agent1", "message": "plan of agent1"}]
    assert (first.observation or "").startswith("INBOX from agent2: plan of agent2")
    assert [a.role for a in record.agents] == ["proposer", "responder"]
    assert [(x.kind, x.to, x.pure) for x in first.actions] == [("send_message", "agent2", True)]


def test_waiting_agent_takes_no_turn_until_a_message_arrives():
    record = roll(
        script(
            agent1=[bash("send_message --wait agent2 'ready?'"), SUBMITS],
            agent2=[bash("ls"), bash("ls"), bash("send_message agent1 'yes'"), SUBMITS],
        )
    )
    one, two = record.agents
    assert len(one.turns) == 2 and len(two.turns) == 4
    assert one.turns[0].inbox == [{"from": "agent2", "message": "yes"}]
    assert two.turns[0].inbox == [{"from": "agent1", "message": "ready?"}]


@pytest.mark.parametrize("partner", [[SUBMITS], [bash("send_message --wait agent1 x"), SUBMITS]])
def test_agent_that_waits_for_an_ended_or_waiting_partner_continues(partner):
    wait = bash("send_message agent2 'hello' --wait")
    record = roll(script(agent1=[wait, wait, SUBMITS], agent2=partner))
    assert [a.exit_status for a in record.agents] == ["Submitted", "Submitted"]
    assert len(record.agents[0].turns) == 3


def test_a_message_beside_a_command_is_sent_and_the_command_run():
    record = roll(
        script(agent1=[bash("echo x > a.txt && send_message agent2 'did it'"), SUBMITS], agent2=[bash("ls"), SUBMITS])
    )
    assert record.agents[1].turns[0].inbox == [{"from": "agent1", "message": "did it"}]
    assert "+x" in (record.agents[0].patch or "")


def test_patches_and_verdict():
    family = Pair()
    work = bash("printf 'done\\n' > a.txt; rm dir/b.txt; printf new > c")
    record = roll(script(agent1=[work, SUBMITS], agent2=[bash("printf 'done\\n' > a.txt"), SUBMITS]), family)
    assert record.outcome == {"reward": 1.0, "verdict": "passed", "details": {}}
    assert family.judged == [
        {"agent1": {"a.txt": "done\n", "c": "new"}, "agent2": {"a.txt": "done\n", "dir/b.txt": "kept\n"}}
    ]
    assert record.agents[0].patch == (
        "diff --git a/a.txt b/a.txt\nindex d44e18f..19f86f4 100644\n--- a/a.txt\n+++ b/a.txt\n"
        "@@ -1 +1 @@\n-start\n+done\n"
        "diff --git a/c b/c\nnew file mode 100644\nindex 0000000..3e5126c\n--- /dev/null\n+++ b/c\n@@ -0,0 +1 @@\n"
        "+new\n\\ No newline at end of file\ndiff --git a/dir/b.txt b/dir/b.txt\ndeleted file mode 100644\n"
        "index bd93009..0000000\n--- a/dir/b.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-kept\n"
    )


def test_turns_without_an_action_end_an_agent_when_its_section_says():
    prose, end = ["I think."] * 9, {"agent2": [SUBMITS]}
    for most, exits in ((1, ("FormatError", 1)), (4, ("FormatError", 4)), (None, ("LimitsExceeded", 7))):
        record = roll(script(agent1=prose, **end), max_steps=7, max_format_errors=most)
        assert (record.agents[0].exit_status, len(record.agents[0].turns)) == exits


def test_fenced_block_is_no_action_where_calls_alone_are():
    record = roll(script(agent1=["```bash\nls\n```"] * 3, agent2=[bash("ls"), SUBMITS]), action_format="tool_call")
    assert [a.exit_status for a in record.agents] == ["FormatError", "Submitted"]
    assert {turn.parse_error for turn in record.agents[0].turns} == {NO_ACTION}


def test_every_exit_status_is_recorded():
    prose = "I think we are done here."
    record = roll(script(agent1=[bash("ls")], agent2=[prose]), max_steps=5)
    assert [(a.exit_status, len(a.turns)) for a in record.agents] == [("LimitsExceeded", 5), ("FormatError", 3)]
    wordy = record.agents[1].turns[0]
    assert wordy.parse_error and wordy.actions == [] and "no action" in (wordy.observation or "")
    record = roll(script(agent1=[prose, prose, bash("ls"), prose, prose, SUBMITS], agent2=[SUBMITS]))
    assert record.agents[0].exit_status == "Submitted"


def test_the_context_window_is_not_overrun():
    record = roll(script(agent1=[bash("seq 60")], agent2=[SUBMITS]), max_model_len=900, max_steps=50)
    agent = record.agents[0]
    assert agent.exit_status == "ContextWindowExceeded"
    assert all(len(t.prompt_ids or []) + len(t.output_ids or []) <= 900 for t in agent.turns)
    assert len(agent.turns) >= 2


def test_a_turn_cut_at_its_budget_is_extended_exactly():
    record = roll(script(agent1=["word " * 200, SUBMITS], agent2=[SUBMITS]), max_tokens=64)
    cut, after = record.agents[0].turns
    assert (
        cut.finish_reason == "length" and len(cut.output_ids or []) == 64 and CHAT.end_id not in (cut.output_ids or [])
    )
    whole = (cut.prompt_ids or []) + (cut.output_ids or [])
    assert after.prompt_ids == [*whole, CHAT.end_id, *CHAT.observation_ids(cut.observation or "")]


def test_stripping_the_think_of_history_forks():
    turns = ["<think>\nlong thoughts\n</think>\n\n" + bash("ls"), SUBMITS]
    kept = roll(script(agent1=turns, agent2=[SUBMITS]), noncanonical=0.0)
    forked = roll(script(agent1=turns, agent2=[SUBMITS]), noncanonical=0.0, history_think="strip")
    rows = [to_tables([r])["turns"].to_pylist() for r in (kept, forked)]
    assert [[row["prefix_turn"] for row in table] for table in rows] == [[None, 0, None], [None, None, None]]
    assert rows[1][1]["drift_at"] is not None
    last = CHAT.decode(forked.agents[0].turns[1].prompt_ids or [])
    assert "long thoughts" not in last and bash("ls") in last
    assert kept.agents[0].turns[0].think_tokens == len(CHAT.encode("\nlong thoughts\n"))
    assert kept.agents[0].turns[1].think_tokens == 0
    # The newlines after the block, the call and the end of the turn.
    assert kept.agents[0].turns[0].post_think_tokens == len(CHAT.encode("\n\n" + bash("ls"))) + 1
    assert kept.agents[0].turns[1].post_think_tokens == len(kept.agents[0].turns[1].output_ids or [])


def test_requests_carry_the_grammar_from_the_end_of_their_prompt():
    seen: list[ThinkGrammar | None] = []

    def watching(request: Request) -> str:
        seen.append(request.grammar)
        return SUBMITS

    roll(watching, grammar=GrammarSection(slots=("PLAN",), max_chars=40))
    assert seen == [ThinkGrammar.of(("PLAN",), 40)] * 2
    seen.clear()
    roll(watching)
    assert seen == [None, None]


def test_failures_are_recorded_in_the_rollout():
    def broken(request):
        if len(request.messages) > 3:
            raise ConnectionError("engine went away")
        return bash("echo hi > new.txt")

    record = roll(script(agent1=broken, agent2=[SUBMITS]))
    assert record.error == "loop: ConnectionError: engine went away"
    assert [a.exit_status for a in record.agents] == ["Error", "Submitted"]
    assert record.outcome == {"reward": None, "verdict": "infrastructure", "details": {"stage": "loop"}}
    assert len(record.agents[0].turns) == 1 and record.wall_seconds

    class Unjudgeable(Pair):
        def judge(self, task, final, sandboxes):
            raise OSError("disk")

    record = roll(script(agent1=[SUBMITS], agent2=[SUBMITS]), Unjudgeable())
    assert record.error == "judge: OSError: disk"
    assert [a.exit_status for a in record.agents] == ["Submitted", "Submitted"]


def test_without_a_sandbox_nothing_is_recorded():
    class Nowhere:
        name = "nowhere"

        def create(self, files, limits=None, environment=None):
            raise SandboxUnavailable("install it")

    engine = ScriptedEngine(null_policy, CHAT, "t")
    runtime = RolloutRuntime(Pair(), engine, Nowhere(), CHAT)  # pyright: ignore[reportArgumentType]
    with pytest.raises(SandboxUnavailable, match="install it"):
        run_rollout(RolloutJob(TASK, AgentSection(), IDENTITY), runtime)


def test_single_agent_rollout():
    record = roll(script(agent1=[bash("printf done > a.txt"), SUBMITS]), Pair(agents=("agent1",)))
    assert [(a.role, a.exit_status) for a in record.agents] == [("solo", "Submitted")]
    assert record.outcome and record.outcome["reward"] == 1.0


def test_reference_and_null_prove_a_suite():
    family = CoopTinyShared()
    tasks = [task for task in family.load("coop_tiny_shared", 3, {"train": 3, "heldout": 0}) if isinstance(task, Task)]
    for policy, reward in ((reference_policy(family), 1.0), (null_policy, 0.0)):
        engine = ScriptedEngine(policy, CHAT, "t")
        section = AgentSection(max_tokens=2000, max_model_len=8000)
        for task in tasks:
            record = run_rollout(RolloutJob(task, section, IDENTITY), RolloutRuntime(family, engine, BOX, CHAT))
            assert record.outcome and record.outcome["reward"] == reward, record
            assert record.error is None


def test_equal_jobs_have_equal_rollout_ids_and_prompts():
    policy = script(agent1=[bash("ls"), SUBMITS], agent2=[bash("cat a.txt"), SUBMITS])
    one, two = roll(policy), roll(policy)
    assert one.rollout_id == two.rollout_id == rollout_id(TASK, 0, "spec")
    ids = [prompts_of(to_tables([record])["turns"]) for record in (one, two)]
    assert ids[0] == ids[1]
    assert rollout_id(TASK, 1, "spec") != one.rollout_id != rollout_id(TASK, 0, "other")


@pytest.mark.parametrize("thought", ["<think>\nI look.\n</think>\n\n", ""])
def test_scripted_engine_goes_on_in_a_think_block_that_the_prompt_opened(thought):
    chat = load_chat_format("qwen3", "qwen3_6")
    prompt = chat.prompt_ids([{"role": "user", "content": "?"}])
    assert chat.decode(prompt).endswith("<think>\n")
    engine = ScriptedEngine(lambda request: f"{thought}ls", chat, "t")
    (done,) = engine.complete([Request("r", "s", prompt, (), Sampler(max_tokens=64))])
    assert chat.decode(done.output_ids or ()).partition("</think>\n\n")[::2] == (
        "I look.\n" if thought else "",
        "ls<|im_end|>",
    )
