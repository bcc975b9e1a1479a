"""Specs: reading, validating, merging, and which assets a change stales."""

from __future__ import annotations

import re

import pytest

from etpi_assets.graph import GRAPH
from etpi_assets.planning.planner import plan
from etpi_assets.resources import HardwareMissing, require_hardware
from etpi_assets.specs.experiment import ServingSection
from etpi_assets.specs.load import MODELS, SpecError, load_shipped, load_specs
from etpi_assets.specs.paths import PathError, expand, fingerprint
from etpi_assets.specs.training import RLSection
from etpi_resources.lake.lake import Lake
from tests.support.graph import EXPERIMENT, ROLLOUT_SET, SUITE, small_world, write_spec

REINFORCED = '[rl]\nmethod = "grpo"\nsuite = "small"\nrewards = [{function = "format", weight = 1.0}]\n'


@pytest.fixture
def folder(tmp_path):
    return small_world(tmp_path)


def _experiment(folder, text, name="mine"):
    write_spec(folder, "experiments", name, text)
    return load_specs(folder).entry("experiment", name)


def test_shipped_specs_are_valid():
    specs = load_specs()
    errors = [str(e) for s in MODELS for k in specs.keys(s) if (e := specs.entry(s, k).error)]
    assert errors == []
    assert {"plan_first_tiny", "plan_first_tiny_weak"} <= set(specs.keys("experiment"))


@pytest.mark.parametrize("name", ["etpi_phase1", "terminal_grpo_0_8b", "grpo_tcr_4b"])
def test_reference_at_full_size_resolves_and_names_its_hardware(name, tmp_path, monkeypatch):
    specs = load_specs()
    assert {step.state for step in plan(name, specs, Lake(tmp_path))} == {"missing"}
    assert re.search(r"GPUs? of \d+ GB", specs.experiments[name].notes)
    monkeypatch.setattr("etpi_assets.resources.ACCELERATORS", ())
    with pytest.raises(HardwareMissing, match=name):
        require_hardware(specs.experiments[name], name)


@pytest.mark.parametrize(
    ("text", "key", "near"),
    [
        ("sead = [1]", "sead", "'seeds'"),
        ("[train]\nlearning_rat = 1", "train.learning_rat", "'train.learning_rate'"),
        ("learning_rate = 1", "learning_rate", "'train.learning_rate'"),
        ("[train]\nmin_reward = 1", "train.min_reward", "'select.min_reward'"),
        ("[train]\nlr = 1", "train.lr", "'train.learning_rate'"),
        ("[rl]\nlr = 1", "rl.lr", "'rl.learning_rate'"),
        ("[train]\ngrad_accum = 1", "train.grad_accum", "'train.batch_tokens'"),
        ("[rl]\ngrad_accum = 1", "rl.grad_accum", "'rl.accumulate'"),
        ("[train]\ntuning = 'lora'", "train.tuning", "'train.method'"),
        ('model = "x"', "model", "'base'"),
        ("[train]\nlora_r = 1", "train.lora_r", "'train.lora_rank'"),
        ("[train]\nmax_seq_length = 1", "train.max_seq_length", "'dataset.max_length'"),
        ("num_train_epochs = 1", "num_train_epochs", "'train.epochs'"),
        ("[[evaluate.decodings]]\nname = 'x'\ntemprature = 1", "evaluate.decodings.0.temprature", "temperature'"),
    ],
)
def test_unknown_key_names_file_key_and_nearest(folder, text, key, near):
    entry = _experiment(folder, 'title = "e"\nrollout_sets = ["few"]\n' + text)
    message = str(entry.error)
    assert entry.spec is None
    assert f"experiments/mine.toml: {key}: unknown key" in message
    assert near in message


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[train]\nepochs = 1\n[train]\nepochs = 2", "line 5, column 7"),
        ("[train]\nepochs 1", "line 4, column 8"),
        ('notes = "x\n', "line 3, column 11"),
    ],
)
def test_error_of_toml_names_file_line_and_column(folder, text, place):
    message = str(_experiment(folder, 'title = "e"\nrollout_sets = ["few"]\n' + text).error)
    assert "experiments/mine.toml: not TOML: " in message and message.endswith(f" at {place}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seeds", "[0, 1, 0]"),
        ("rollout_sets", '["few", "few"]'),
        ("evaluate.roles", '["base", "base"]'),
        ("evaluate.sample_seeds", "[3, 3]"),
        ("evaluate.decodings", '[{name = "t", temperature = 0.5}, {name = "t", temperature = 1.0}]'),
        ("evaluate.budgets", '[{name = "long", max_steps = 2}, {name = "long"}]'),
    ],
)
def test_list_that_names_something_twice_is_refused(folder, key, value):
    write_spec(folder, "experiments", "first", EXPERIMENT)
    error = str(_experiment(folder, f'extends = "first"\n{key} = {value}').error)
    assert f"mine.toml: {key}: " in error and "occurs twice" in error


def test_unknown_key_shows_the_meaning_of_the_nearest(folder):
    error = _experiment(folder, EXPERIMENT + "[train]\nlearning_rat = 1").error
    assert "'train.learning_rate' (Peak learning rate" in str(error)


def test_all_unknown_keys_are_named_together(folder):
    message = str(_experiment(folder, 'title = "e"\nrollout_sets = ["few"]\nsead = 1\ntitel = 2').error)
    assert "sead" in message and "titel" in message


def test_invalid_spec_keeps_its_name_and_others_load(folder):
    write_spec(folder, "experiments", "broken", "title = ")
    specs = load_specs(folder)
    assert {"broken", "first", "second"} <= set(specs.keys("experiment"))
    assert "first" in specs.experiments and "broken" not in specs.experiments
    assert specs.upstream_keys("experiment", "broken", "rollout_set") == []
    with pytest.raises(SpecError, match=r"broken\.toml: .*TOML"):
        specs.get("experiment", "broken")


def test_unknown_name_offers_only_near_names_and_the_folders_read(folder):
    with pytest.raises(SpecError) as raised:
        load_specs(folder).get("experiment", "frist")
    assert "'first'" in str(raised.value) and "plan_first_tiny" not in str(raised.value)
    assert str(folder) in str(raised.value) and "ETPI_SPECS" in str(raised.value)
    with pytest.raises(SpecError) as raised:
        load_specs(folder).get("experiment", "zzz")
    assert "Did you mean" not in str(raised.value)
    message = str(_experiment(folder, EXPERIMENT.replace("few", "fwe")).error)
    assert re.search("rollout_sets: .*'fwe'.*'few'", message)


def test_name_that_moved_to_the_lab_says_how_to_install_it():
    with pytest.raises(SpecError, match=r"'plan_first_apart'.*pip install \./lab"):
        load_shipped().get("experiment", "plan_first_apart")


def test_bad_value_names_the_key(folder):
    message = str(_experiment(folder, EXPERIMENT + "[dataset]\nupweight_factor = -1\n").error)
    assert "experiments/mine.toml: dataset.upweight_factor: has to be greater than 0" in message


def test_extends_merges_tables_and_replaces_the_rest(folder):
    write_spec(folder, "experiments", "parent", EXPERIMENT + "seeds = [1, 2]\n[train]\nepochs = 3\nlora_rank = 8\n")
    spec = _experiment(folder, 'extends = "parent"\nseeds = [5]\n[train]\nepochs = 4\n').spec
    assert (spec.title, spec.seeds, spec.train.epochs, spec.train.lora_rank) == ("e", (5,), 4.0, 8)


def test_extends_errors_name_the_file(folder):
    message = str(_experiment(folder, 'extends = "frist"\n').error)
    assert re.search(r"mine\.toml: extends: .*'frist'.*'first'", message)
    write_spec(folder, "experiments", "a", 'extends = "b"')
    write_spec(folder, "experiments", "b", 'extends = "a"')
    assert "goes in a circle: a -> b -> a" in str(load_specs(folder).entry("experiment", "a").error)


def test_spec_with_very_many_unknown_keys_names_the_first(folder):
    error = str(_experiment(folder, "\n".join(f"key{number}.a.b = 1" for number in range(200))).error)
    assert 40 < error.count("unknown key") <= 50 and error.endswith(" more problems"), error[-300:]


def test_none_means_null_only_for_optional_keys(folder):
    spec = _experiment(
        folder, EXPERIMENT.replace('{suite = "small"}', '"none"') + '[select]\nmin_reward = "none"\n'
    ).spec
    assert spec.evaluate is None and spec.select.min_reward is None
    assert _experiment(folder, EXPERIMENT + '[train]\nmethod = "none"\n').spec.train.method == "none"
    assert "epochs" in str(_experiment(folder, EXPERIMENT + '[train]\nepochs = "none"\n').error)


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("", ("base", "sft")),
        ('[rl]\nmethod = "none"\n', ("base", "sft")),
        (REINFORCED, ("base", "sft", "rl")),
        (REINFORCED + '[evaluate]\nsuite = "small"\nroles = ["base"]\n', ("base",)),
    ],
)
def test_reinforced_checkpoint_is_evaluated_unless_roles_say_otherwise(folder, text, roles):
    whole = EXPERIMENT if "[evaluate]" not in text else EXPERIMENT.replace('evaluate = {suite = "small"}', "")
    entry = _experiment(folder, whole + text)
    assert entry.error is None and entry.spec.evaluate.roles == roles


def test_engine_is_in_a_resolved_section_only_if_chosen():
    kept = RLSection().model_dump()
    assert not {"engine", "options"} & kept.keys(), "versions made before these keys existed keep their hashes"
    chosen = RLSection(engine="vllm", options={"seed": 1})
    assert RLSection.model_validate(chosen.model_dump(mode="json")) == chosen and RLSection(**kept) == RLSection()
    for section in (RLSection, ServingSection):
        with pytest.raises(ValueError, match='engine = "vllm"'):
            section(options={"seed": 1})
    with pytest.raises(ValueError, match=r"rl\.options\.logprobs-mode"):
        chosen = {"engine": "vllm", "options": {"logprobs_mode": "raw_logprobs"}}
        RLSection.model_validate({"method": "grpo", "suite": "s", "rewards": [{"function": "format"}], **chosen})


def test_sections_of_the_graph_exist_in_the_models():
    for node in GRAPH.values():
        if node.set != "all":
            known = set(MODELS[node.set].model_fields) | {"*"}
            assert {section.partition(".")[0] for section in node.sections} <= known, node.name


def test_changed_key_stales_only_assets_that_depend_on_its_section(folder):
    def hashes(text):
        write_spec(folder, "experiments", "first", text)
        specs = load_specs(folder)
        return {
            n.name: specs.section_hash("experiment", "first", n.sections)
            for n in GRAPH.values()
            if n.set == "experiment" and "*" not in n.sections
        }

    before = hashes(EXPERIMENT)

    def changed(text):
        after = hashes(text)
        return {name for name in after if after[name] != before[name]}

    assert changed(EXPERIMENT.replace('{suite = "small"}', '{suite = "small", tasks = 7}')) == {"eval_rollouts"}
    elsewhere = EXPERIMENT.replace('{suite = "small"}', '{suite = "small", split = "train"}')
    assert changed(elsewhere) == {"eval_rollouts", "upweighted_dataset"}, "a gate compares its prompts with training's"
    assert changed(EXPERIMENT.replace('title = "e"', 'title = "other"')) == set()
    assert changed(EXPERIMENT + "[dataset]\nupweight_factor = 3\n") == {"upweighted_dataset"}
    assert changed(EXPERIMENT + "# a comment\n") == set()


@pytest.mark.parametrize(
    ("kind", "name", "text", "stale"),
    [
        ("experiments", "first", EXPERIMENT + "[metrics.thresholds]\nplan_first = 0.9\n", True),  # a report prints it
        ("rollout_sets", "few", ROLLOUT_SET + 'license = "mit"\n', True),
        ("rollout_sets", "few", ROLLOUT_SET.replace('"r"', '"other"'), False),
    ],
)
def test_reports_are_stale_after_a_change_of_what_they_print(folder, kind, name, text, stale):
    def hashes():
        specs = load_specs(folder)
        nodes = [GRAPH[name] for name in ("experiment_report", "model_card")]
        return [specs.section_hash("experiment", "first", node.sections) for node in nodes]

    before = hashes()
    write_spec(folder, kind, name, text)
    assert [was != now for was, now in zip(before, hashes(), strict=True)] == [stale, stale]


def test_pairs_are_stale_after_the_tokenizer_of_imported_ids_was_named(folder):
    def pairs_hash(options):
        write_spec(folder, "rollout_sets", "few", f'title = "r"\nkind = "imported"\npath = "p"\n{options}')
        return load_specs(folder).section_hash("experiment", "first", GRAPH["tito_pairs"].sections)

    assert pairs_hash('[options]\ntokenizer = "qwen3"\n') != pairs_hash("") == pairs_hash('[options]\nrepo = "r"\n')


def test_mapping_follows_the_specs(folder):
    write_spec(folder, "suites", "other", SUITE)
    write_spec(folder, "rollout_sets", "more", ROLLOUT_SET.replace("small", "other"))
    text = 'title = "e"\nrollout_sets = ["more", "few"]\nbase = {kind = "tiny"}\nevaluate = {suite = "small"}\n'
    _experiment(folder, text)
    specs = load_specs(folder)
    assert specs.upstream_keys("experiment", "mine", "rollout_set") == ["more", "few"]
    assert specs.upstream_keys("experiment", "mine", "suite") == ["other", "small"]
    assert specs.upstream_keys("rollout_set", "more", "suite") == ["other"]


def test_paths_come_from_the_environment(tmp_path, monkeypatch):
    with pytest.raises(PathError, match="export LOGS_HERE="):
        expand("${LOGS_HERE}/a")
    monkeypatch.setenv("LOGS_HERE", str(tmp_path))
    assert expand("${LOGS_HERE}/a") == tmp_path / "a"
    assert fingerprint("${LOGS_HERE}") == "absent"
    (tmp_path / "a").write_text("one")
    first = fingerprint("${LOGS_HERE}")
    assert first == fingerprint("${LOGS_HERE}") != "absent"
    (tmp_path / "a").write_text("three")
    assert fingerprint("${LOGS_HERE}") != first


def test_earlier_name_of_a_key_is_read_with_a_warning_and_stays_in_the_resolved_spec(tmp_path):
    text = 'extends = "plan_first_tiny"\ntitle = "t"\nbase.tiny.{} = 0.02\n'
    for name in ("matrix_rate", "muon_lr"):
        write_spec(tmp_path, "experiments", f"with_{name}", text.format(name))
    with pytest.warns(FutureWarning, match=r"with_matrix_rate\.toml: matrix_rate .*muon_lr"):
        specs = load_specs(tmp_path)
    earlier, today = (specs.get("experiment", f"with_{name}").base.tiny for name in ("matrix_rate", "muon_lr"))
    assert earlier == today and today.muon_lr == 0.02
    assert today.model_dump()["matrix_rate"] == 0.02 and "muon_lr" not in today.model_dump()
