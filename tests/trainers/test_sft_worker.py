"""The trainer learns exactly the weighted labels of the dataset, and leaves behind what it learnt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from etpi_resources.trainers.contracts import FirstPass, SftWorkerConfig, SftWorkerResult
from etpi_resources.trainers.pipes import WorkerFailed, run_worker
from etpi_resources.trainers.workers import checkpointing, device, sft_worker, tree_attention, weighted_trainer
from etpi_resources.trainers.workers.checkpointing import load_model, logits_of
from etpi_resources.trainers.workers.collate import BadSequences, read_sequences
from etpi_resources.trainers.workers.device import Compute
from etpi_resources.trainers.workers.plan import PlanSettings, make_plan
from etpi_resources.trainers.workers.reporting import CONFIG_FILE, Worker
from tests.support.sft import config_of, digest, in_process, worker_in
from tests.support.tiny_training import TEMPLATE, VOCABULARY, learnable, make_base, naive_sums, sequence, write

# Models this small are faster on one thread, and threads that wait for cores would time the machine, not the code.
torch.set_num_threads(1)


SPAN = ("starts", "ends", "weights")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def one_step_gradient(folder: Path, base: Path, rows: list[dict], monkeypatch, replicated=False, **train):
    """(gradient of one optimiser step over all rows by tensor name, the plan, the trainer). The trainer's own loop
    applies it: with plain SGD of learning rate 1, unclipped, the weights move by minus the gradient."""
    monkeypatch.setattr(sft_worker, "GRADIENT_NORM", 1e9)
    folder.mkdir()
    plain = {
        "optimizer": "sgd",
        "learning_rate": 1.0,
        "schedule": "constant",
        "warmup_ratio": 0.0,
        "batch_tokens": 10**6,
    }
    config = config_of(base, [write(rows, folder / "sequences.parquet")], **plain, **train)
    sequences = read_sequences(config.files, "train", vocabulary=VOCABULARY, longest=512)
    plan = make_plan(
        sequences.lengths().tolist(),
        sequences.rows.tolist(),
        sequences.totals(sequences.weights).tolist(),
        PlanSettings(
            epochs=1.0, max_steps=None, batch_tokens=10**6, micro_tokens=256, schedule="constant", warmup=0.0, seed=0
        ),
    )
    model = load_model(base, torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = sft_worker.build_trainer(
        worker_in(folder, config), model, plan, sequences, compute=Compute(False, "fp32"), replicated=replicated
    )
    trainer.train()
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}, plan, trainer


def relative(a: dict, b: dict) -> float:
    """|a - b| / |b| over all tensors together."""
    flat_a, flat_b = (torch.cat([x[name].flatten() for name in b]) for x in (a, b))
    return float((flat_a - flat_b).norm() / flat_b.norm())


@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_accumulated_step_is_gradient_of_weighted_mean(tmp_path, base, monkeypatch, checkpointing, replicated):
    rows = learnable(9)
    got, plan, trainer = one_step_gradient(
        tmp_path / "run", base, rows, monkeypatch, replicated, gradient_checkpointing=checkpointing
    )
    assert plan.steps == 1 and len(plan.batches) > 2, "the step must be an accumulated one"
    model = load_model(base, torch.float32)
    nll, weight = naive_sums(model, rows)
    (nll / weight).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    assert relative(got, wanted) < 1e-5
    assert trainer.first_pass.loss() == pytest.approx(nll.item() / weight, rel=1e-5)
    assert float(trainer.first_pass.weight) == pytest.approx(weight)


def test_validation_that_forks_is_that_of_its_branches_where_training_does_not_fork(tmp_path, base):
    ids = [*range(3, 34)]
    forks = {"node_starts": [0, 20, 25], "node_parents": [-1, 0, 0], "node_positions": [0, 20, 20]}
    tree = sequence("tree", ids, [(22, 25, 1.0), (27, 31, 1.0)], "val") | forks
    alone = [sequence("a", ids[:25], [(22, 25, 1.0)]), sequence("b", [*ids[:20], *ids[25:]], [(22, 26, 1.0)])]
    result = in_process(tmp_path / "run", config_of(base, [write([*learnable(8), tree], tmp_path / "s.parquet")]))
    assert result.plan.layout == "rows"
    with torch.no_grad():
        nll, weight = naive_sums(load_model(base, torch.float32), alone)
    assert result.log[0].val_loss == pytest.approx(float(nll) / weight, rel=1e-5)


@pytest.mark.parametrize("refusal", [None, "recurrent"])
def test_gpu_has_longest_branches_first_in_trees_alone(tmp_path, base, monkeypatch, refusal):
    class Chosen(Exception):
        pass

    def choose(worker, model, plan, sequences, **_):
        raise Chosen(sequences)

    forks = {"node_starts": [0, 20, 22], "node_parents": [-1, 0, 0], "node_positions": [0, 20, 20]}
    files = [write([sequence("tree", [*range(3, 34)], [(22, 31, 1.0)]) | forks], tmp_path / "s.parquet")]
    monkeypatch.setattr(device, "choose_compute", lambda *_: Compute(gpu=True, dtype="fp32"))
    monkeypatch.setattr(tree_attention, "refuses_trees", lambda _: refusal)
    monkeypatch.setattr(sft_worker, "build_trainer", choose)
    with pytest.raises(Chosen) as chosen:
        in_process(tmp_path / "run", config_of(base, files, layer_kernels="torch"))
    stored = read_sequences(files, "train", vocabulary=VOCABULARY, longest=64)
    wanted = stored.branches() if refusal else stored.longest_first()
    assert (chosen.value.args[0].ids == wanted.ids).all() and (stored.longest_first().ids != stored.ids).any()


def test_layers_get_hidden_states_in_the_dtype_of_autocast(tmp_path, base, monkeypatch):
    rows = [sequence("a", [*range(3, 40)], [(20, 30, 1.0)])]
    _, _, trainer = one_step_gradient(tmp_path / "run", base, rows, monkeypatch)
    model, seen, ids = trainer.model, [], torch.arange(3, 40, device=trainer.model.device)[None]
    model.model.layers[1].register_forward_pre_hook(lambda layer, states: seen.append(states[0].dtype))
    with torch.autocast(model.device.type, torch.bfloat16):
        model(input_ids=ids).logits.float().sum().backward()
    model(input_ids=ids)
    assert seen == [torch.bfloat16, torch.float32]
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("method", ["full", "lora"])
def test_checkpoint_stops_at_the_ends_of_turns_it_was_trained_with(tmp_path, base, method):
    config = config_of(base, [write(learnable(4), tmp_path / "s.parquet")], method=method, learning_rate=1e-2)
    result = in_process(tmp_path / "run", config.model_copy(update={"end_ids": (7, 9)}))
    model = load_model(tmp_path / "run" / result.checkpoints[-1].folder, torch.float32)
    assert model.generation_config.eos_token_id[:2] == [7, 9]


def test_row_of_double_weight_equals_two_rows(tmp_path, base, monkeypatch):
    rows = learnable(5)
    first, *_ = rows
    doubled = sequence(
        "doubled",
        first["input_ids"],
        [(first["span_starts"][0], first["span_ends"][0], 8.0), (first["span_starts"][1], first["span_ends"][1], 1.0)],
    )
    again = sequence(
        "again", first["input_ids"][: first["span_ends"][0]], [(first["span_starts"][0], first["span_ends"][0], 4.0)]
    )
    weighted, *_ = one_step_gradient(tmp_path / "a", base, [doubled, *rows[1:]], monkeypatch)
    repeated, *_ = one_step_gradient(tmp_path / "b", base, [*rows, again], monkeypatch)
    plain, *_ = one_step_gradient(tmp_path / "c", base, rows, monkeypatch)
    assert relative(weighted, repeated) < 1e-5
    assert relative(plain, repeated) > 1e-2, "the weight must matter for the comparison to mean anything"


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """A full run through the launcher: (result, folder, rows)."""
    folder = tmp_path_factory.mktemp("full")
    rows = learnable(120, validation=12)
    files = [write(rows[:70], folder / "a.parquet"), write(rows[70:], folder / "b.parquet")]
    config = config_of(base, files, epochs=4.0, learning_rate=1e-2, save_steps=10, batch_tokens=1024)
    config = config.model_copy(update={"chat_template": "other template"})
    return run_worker(sft_worker.MODULE, config, folder / "run", SftWorkerResult, echo=None), folder / "run", rows


def test_every_label_and_token_of_the_dataset_enters_the_loss(trained):
    result, _, rows = trained
    train = [row for row in rows if row["split"] == "train"]
    spans = sum(e - s for row in train for s, e in zip(row["span_starts"], row["span_ends"], strict=True))
    tokens = sum(len(row["input_ids"]) for row in train)
    weights = sum((e - s) * w for row in train for s, e, w in zip(*(row[f"span_{n}"] for n in SPAN), strict=True))
    assert result.counted == FirstPass(
        complete=True, labels=spans, labels_planned=spans, tokens=tokens, tokens_planned=tokens,
        weights=weights, weights_planned=weights,
    )  # fmt: skip
    assert result.libraries["torch"].startswith("2.") and result.libraries["trl"]
    assert result.plan.sequences == 120 and result.plan.epochs == pytest.approx(4.0)


def test_loss_falls_and_validation_is_weighted_mean_over_the_split(trained, base):
    result, folder, rows = trained
    validation = [row for row in rows if row["split"] == "val"]
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert log == [line.model_dump() for line in result.log]
    assert set(log[0]) == {"step", "epoch", "loss", "token_accuracy", "val_loss", "learning_rate", "tokens", "seconds"}
    assert 0 <= log[1]["token_accuracy"] < log[-1]["token_accuracy"] <= 1
    assert result.checkpoints[-1].token_accuracy == log[-1]["token_accuracy"]
    with torch.no_grad():
        for line, checkpoint in ((log[0], base), (log[-1], folder / result.checkpoints[-1].folder)):
            nll, weight = naive_sums(load_model(checkpoint, torch.float32), validation)
            assert line["val_loss"] == pytest.approx(float(nll) / weight, rel=1e-4)
    assert log[-1]["loss"] < 0.5 * log[1]["loss"]
    assert log[-1]["step"] == result.plan.steps
    assert [line["epoch"] for line in log if line["val_loss"] is not None] == pytest.approx([0, 1, 2, 3, 4], abs=0.1)
    fed = 4 * sum(len(row["input_ids"]) for row in rows if row["split"] == "train")
    assert log[-1]["tokens"] == fed


def test_every_saved_step_is_a_whole_model_and_the_last_is_final(trained, base):
    result, folder, _ = trained
    steps = [c.step for c in result.checkpoints]
    assert steps == [*range(10, steps[-1], 10), result.plan.steps]
    assert [c.final for c in result.checkpoints] == [False] * (len(steps) - 1) + [True]
    ids = torch.arange(3, 40)[None]
    seen = [logits_of(load_model(folder / c.folder, torch.float32), ids) for c in result.checkpoints]
    for earlier, later in zip([logits_of(load_model(base, torch.float32), ids), *seen], seen, strict=False):
        assert not torch.allclose(earlier, later)
    files = {p.name for p in (folder / f"step-{steps[-1]}").iterdir()}
    assert files == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert (folder / f"step-{steps[-1]}" / "chat_template.jinja").read_text() == "other template"
    assert result.saved.unchanged == () and result.saved.differing == ()
    assert result.saved.reload_difference < 1e-6


def test_lora_leaves_adapter_and_merged_model_that_agree_and_the_same_seed_the_same_bytes(tmp_path, base):
    from peft import PeftModel

    files = [write(learnable(30), tmp_path / "sequences.parquet")]
    config = config_of(
        base, files, method="lora", lora_rank=4, learning_rate=1e-2, save_steps=3, epochs=2.0, max_steps=5
    )
    result = in_process(tmp_path / "one", config)
    assert [(c.step, c.adapter) for c in result.checkpoints] == [
        (3, "step-3/adapter"),
        (5, "step-5/adapter"),
    ]
    ids = torch.arange(3, 40)[None]
    for step in (3, 5):
        folder = tmp_path / "one" / f"step-{step}"
        merged = logits_of(load_model(folder, torch.float32), ids)
        attached = PeftModel.from_pretrained(load_model(base, torch.float32), folder / "adapter")
        assert torch.allclose(merged, logits_of(attached, ids), atol=1e-5)
        assert not torch.allclose(merged, logits_of(load_model(base, torch.float32), ids), atol=1e-3)
        adapter_config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        assert adapter_config["base_model_name_or_path"] == "tiny"
        assert adapter_config["target_modules"] == sorted(adapter_config["target_modules"])
        assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    saved = result.saved
    assert saved.zero_adapters == () and saved.adapters == 14 and saved.differing == ()
    assert saved.reload_difference < 1e-5 and saved.merge_difference < 1e-5
    again = in_process(tmp_path / "two", config)
    assert digest(tmp_path / "one" / "step-5") == digest(tmp_path / "two" / "step-5")
    assert again.log[-1].loss == result.log[-1].loss
    in_process(tmp_path / "three", config.model_copy(update={"seed": 1}))
    assert digest(tmp_path / "one" / "step-5") != digest(tmp_path / "three" / "step-5")


def test_adapter_of_an_earlier_step_is_proven_if_it_is_used(tmp_path, base, monkeypatch):
    save_adapter, save_model = checkpointing.save_adapter, checkpointing.save_model

    def without_effect(model, folder, name):
        save_adapter(model, folder, name)
        if folder.parent.name == "step-1":
            tensors = load_file(folder / "adapter_model.safetensors")
            tensors = {key: value * ("lora_B" not in key) for key, value in tensors.items()}
            save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})

    def spoiled(model, folder, *arguments):
        save_model(model, folder, *arguments)
        if folder.name == "step-1":
            tensors = {key: value + 1 for key, value in load_file(folder / "model.safetensors").items()}
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(checkpointing, "save_adapter", without_effect)
    monkeypatch.setattr(checkpointing, "save_model", spoiled)
    files = [write(learnable(30), tmp_path / "sequences.parquet")]
    for used in (1, 2):
        train = {"method": "lora", "learning_rate": 1e-2, "save_steps": 1, "max_steps": 2, "use_step": used}
        saved = in_process(tmp_path / str(used), config_of(base, files, **train)).saved
        assert bool(saved.zero_adapters) == bool(saved.differing) == (saved.changed_share == 0.0) == (used == 1)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_base_stored_in_16_bits_is_trained_in_32_and_saved_in_16(tmp_path, method):
    base = make_base(tmp_path / "base", dtype="bfloat16")
    files = [write(learnable(20), tmp_path / "sequences.parquet")]
    result = in_process(tmp_path / "run", config_of(base, files, method=method, learning_rate=1e-3))
    folder = tmp_path / "run" / result.checkpoints[-1].folder
    stored, of_base = (load_file(f / "model.safetensors") for f in (folder, base))
    assert set(stored) == set(of_base), "tied weights must be stored once"
    assert {t.dtype for t in stored.values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    saved = result.saved
    assert saved.dtype == "bfloat16" and saved.differing == ()
    assert saved.reload_difference == 0.0, "equal weights in one dtype have equal logits"
    assert not saved.unchanged and not saved.zero_adapters and 0.1 < saved.changed_share <= 1


def test_proof_of_a_base_in_16_bits_loads_no_copy_in_float32(tmp_path, monkeypatch):
    base = make_base(tmp_path / "base", dtype="bfloat16")
    loaded, load = [], checkpointing.load_model

    def spy(folder, dtype, device="cpu"):
        loaded.append(dtype)
        return load(folder, dtype, device)

    monkeypatch.setattr(checkpointing, "load_model", spy)
    files = [write(learnable(6), tmp_path / "sequences.parquet")]
    in_process(tmp_path / "run", config_of(base, files, max_steps=1))
    of_training, *of_proof = loaded
    assert of_training == torch.float32 and set(of_proof) == {torch.bfloat16}


def test_a_change_that_rounding_to_16_bits_undoes_is_no_change(tmp_path):
    base = make_base(tmp_path / "base", dtype="bfloat16")
    model = load_model(base, torch.float32)
    weight = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    weight.data += weight.data * 2**-12
    before = load_model(base, torch.bfloat16)
    unchanged, trained, share = checkpointing.changes_from_base(model, before, torch.bfloat16)
    assert share == 0.0 and len(unchanged) == trained - 1
    weight.data += 1
    assert 0 < checkpointing.changes_from_base(model, before, torch.bfloat16)[2] < 1


def test_a_learning_rate_of_zero_shows_as_adapters_of_zero_and_weights_unchanged(tmp_path, base):
    files = [write(learnable(6), tmp_path / "sequences.parquet")]
    lora = in_process(tmp_path / "lora", config_of(base, files, method="lora", learning_rate=0.0, max_steps=1))
    assert len(lora.saved.zero_adapters) == lora.saved.adapters > 0
    full = in_process(tmp_path / "full", config_of(base, files, learning_rate=0.0, max_steps=1))
    assert len(full.saved.unchanged) == full.saved.trained > 0


def test_labels_dropped_before_the_loss_are_counted_as_missing(tmp_path, base, monkeypatch):
    honest = weighted_trainer.collate

    def forgetful(*arguments):
        batch = honest(*arguments)
        batch["labels"][0, : batch["labels"].shape[1] // 2] = -100
        return batch

    monkeypatch.setattr(weighted_trainer, "collate", forgetful)
    files = [write(learnable(20), tmp_path / "sequences.parquet")]
    counted = in_process(tmp_path / "run", config_of(base, files, epochs=2.0)).counted
    assert 0 < counted.labels < counted.labels_planned
    assert counted.tokens == counted.tokens_planned


def test_run_that_ends_within_first_pass_counts_the_planned_part(tmp_path, base):
    files = [write(learnable(60), tmp_path / "sequences.parquet")]
    counted = in_process(tmp_path / "run", config_of(base, files, max_steps=2)).counted
    assert not counted.complete and 0 < counted.labels == counted.labels_planned


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (sequence("x", [5] * 20, [(0, 5, 1.0)]), r"sequence x .*\[0, 5\).* 1 "),
        (sequence("x", [5] * 20, [(5, 5, 1.0)]), r"\[5, 5\)"),
        (sequence("x", [5] * 20, [(5, 9, 1.0), (8, 12, 1.0)]), r"\[8, 12\)"),
        (sequence("x", [5] * 20, [(5, 21, 1.0)]), "of 20 tokens"),
        (sequence("x", [5] * 20, [(5, 9, 0.0)]), "weight 0.0"),
        (sequence("x", [5] * 20, [(5, 9, float("nan"))]), "weight nan"),
        (sequence("x", [5] * 19 + [VOCABULARY], [(5, 9, 1.0)]), f"token {VOCABULARY}.*base.tokenizer"),
        (sequence("x", [5] * 600, [(5, 9, 1.0)]), "600 tokens.*512.*max_length"),
    ],
)
def test_invalid_sequence_is_refused_by_name(tmp_path, row, words):
    file = write([*learnable(2), row], tmp_path / "sequences.parquet")
    with pytest.raises(BadSequences, match=words):
        read_sequences([file], "train", vocabulary=VOCABULARY, longest=512)


def test_attention_of_many_lengths_is_not_left_to_cudnn(tmp_path, base):
    torch.backends.cuda.enable_cudnn_sdp(True)
    in_process(tmp_path / "run", config_of(base, [write(learnable(2), tmp_path / "sequences.parquet")]))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_missing_gpu_and_invalid_file_fail_with_a_remedy(tmp_path, base):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    files = [write([sequence("x", [5] * 20, [(0, 5, 1.0)])], tmp_path / "sequences.parquet")]
    with pytest.raises(RuntimeError, match="CUDA GPU.*ETPI_TRAINER_PYTHON"):
        in_process(tmp_path / "gpu", config_of(base, files).model_copy(update={"device": "cuda"}))
    with pytest.raises(WorkerFailed, match="sequence x "):
        run_worker(sft_worker.MODULE, config_of(base, files), tmp_path / "bad", SftWorkerResult, echo=None)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda config: config.pop("seed"), "seed"),
        (lambda config: config.update(sed=1), "sed"),
        (lambda config: config["train"].pop("lora_rank"), "train.lora_rank"),
        (lambda config: config["train"].update(rank=1), "train.rank"),
    ],
)
def test_missing_or_unknown_config_key_is_refused_by_name(tmp_path, base, change, field):
    config = json.loads(config_of(base, []).model_dump_json())
    change(config)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(ValidationError, match=f"(?m)^{field}$"):
        Worker(tmp_path, SftWorkerConfig)
