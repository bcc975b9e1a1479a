"""The parts of `gpu_check`: random models and conversations, and what is measured of training on them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

STEPS = 3
"""Steps of a training; the first warms up, the others count."""
FREE = 0.9
"""Share of a GPU's memory that a model is chosen for; measured peaks were 2 % above the estimate."""
_GIB = 1 << 30


@dataclass(frozen=True)
class Size:
    """The shapes of a check.

    Attributes:
        prompt, output, kept, observation: tokens of a conversation's prompt, of a turn, of what its history keeps of
            the turn, and of the observation after it.
        group_prompt, sample: tokens of a GRPO group's prompt and of each of its samples.
        product: rows and columns of the multiplied matrices.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    head: int
    vocabulary: int
    conversations: int
    turns: int
    prompt: int
    output: int
    kept: int
    observation: int
    group_prompt: int
    sample: int
    product: int

    @property
    def tree(self) -> int:
        """Tokens of a conversation."""
        return self.prompt + self.turns * self.output + (self.turns - 1) * (self.kept + self.observation)


FULL = Size(
    hidden=2560, intermediate=9728, layers=36, heads=32, key_heads=8, head=128, vocabulary=151_936, conversations=4,
    turns=12, prompt=1000, output=200, kept=120, observation=400, group_prompt=2000, sample=512, product=8192,
)  # fmt: skip
SMALL = Size(
    hidden=64, intermediate=128, layers=2, heads=2, key_heads=1, head=32, vocabulary=512, conversations=2, turns=4,
    prompt=40, output=20, kept=12, observation=16, group_prompt=60, sample=24, product=256,
)  # fmt: skip
GROUP = 8

Figures = dict[str, Any]


class Skipped(Exception):
    """A part that cannot run here, and why."""


# --- the data ---------------------------------------------------------------------------------------------------------


def conversation(size: Size, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a conversation of random tokens as a row of `sequences`, a tree, and as one row for each turn.

    The history keeps a part of every turn, as it does where thinking is stripped, so each turn is a branch of its own.
    """
    import numpy as np

    rng = np.random.default_rng(seed)

    def random(count: int) -> list[int]:
        return rng.integers(3, size.vocabulary, count).tolist()

    history, rows = random(size.prompt), []
    ids, starts, parents, positions, spans = list(history), [0], [-1], [0], []
    trunk = 0
    for turn in range(size.turns):
        output = random(size.output)
        rows.append({"input_ids": history + output, "labels": [-100] * len(history) + output})
        spans.append((len(ids), len(ids) + len(output)))
        starts, parents, positions = [*starts, len(ids)], [*parents, trunk], [*positions, len(history)]
        ids += output
        if turn == size.turns - 1:
            break
        # What stays must not begin as the turn does, or both would be one branch.
        after = [3 + (output[0] - 2) % (size.vocabulary - 3), *random(size.kept + size.observation - 1)]
        starts, parents, positions = [*starts, len(ids)], [*parents, trunk], [*positions, len(history)]
        trunk = len(starts) - 1
        ids += after
        history = history + after
    sequence = {
        "sequence_id": str(seed), "split": "train", "input_ids": ids, "node_starts": starts, "node_parents": parents,
        "node_positions": positions, "span_starts": [a for a, _ in spans], "span_ends": [b for _, b in spans],
        "span_weights": [1.0] * len(spans), "rows": len(spans),
    }  # fmt: skip
    return sequence, rows


def write_sequences(size: Size, file: Path) -> list[dict[str, Any]]:
    """Write the conversations as a table of sequences; return their turns as rows."""
    import pyarrow.parquet as pq

    from etpi_resources.lake import schemas

    both = [conversation(size, seed) for seed in range(size.conversations)]
    pq.write_table(schemas.from_rows("sequences", [sequence for sequence, _ in both]), file)
    return [row for _, rows in both for row in rows]


# --- the model --------------------------------------------------------------------------------------------------------


def config_of(size: Size) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        hidden_size=size.hidden, intermediate_size=size.intermediate, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.key_heads, head_dim=size.head,
        vocab_size=size.vocabulary, max_position_embeddings=32_768, tie_word_embeddings=True,
    )  # fmt: skip


def random_model(size: Size, gpu: bool, dtype: Any = None) -> Any:
    """Return the model with random weights in float32 or `dtype`, the same for a seed on one kind of device."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if gpu else "cpu"):
        model = Qwen3ForCausalLM(config_of(size))
    return model if dtype is None else model.to(dtype)


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of three words: the trainers only want an id to pad with."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"w0": 0, "w1": 1, "w2": 2}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2").save_pretrained(folder)


def training_of(size: Size, recomputed: bool, length: int) -> tuple[Any, Any]:
    """Return (the rehearsal's estimate of a full training, the model's shape); `recomputed`: gradient checkpointing."""
    from etpi.rehearsal.memory import Training, shape_of
    from etpi_resources.trainers.workers.label_head import TILE

    training = Training(
        full=True,
        rank=0,
        recomputed=recomputed,
        small_states=False,
        shards=1,
        tile=TILE,
        reference=False,
        length=length,
        scored=length,
    )
    return training, shape_of(config_of(size).to_dict())


def fitting(size: Size, gpu: bool, recomputed: bool) -> Size:
    """Return the size with as many layers as a full training has memory for."""
    import torch

    if not gpu:
        return size
    most = torch.cuda.get_device_properties(0).total_memory * FREE
    while size.layers > 1:
        training, shape = training_of(size, recomputed, size.tree)
        if sum(training.memory(shape).values()) <= most:
            return size
        size = replace(size, layers=size.layers - 1)
    return size


# --- measuring --------------------------------------------------------------------------------------------------------


def measured(trainer: Any, gpu: bool, figure: str, figure_of: Callable[[], float] | None = None) -> Figures:
    """Train; return the mean seconds of the steps after the first, the peak memory in GiB, and the figure of step 1."""
    import torch
    from transformers import TrainerCallback

    ends: list[float] = []
    figures: list[float] = []

    class Marks(TrainerCallback):
        def on_step_end(self, *args: Any, **named: Any) -> None:
            if gpu:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            if figure_of is not None:
                figures.append(figure_of())

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            if figure_of is None and logs and figure in logs:
                figures.append(float(logs[figure]))

    trainer.add_callback(Marks())
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / _GIB if gpu else None
    return {"seconds_a_step": (ends[-1] - ends[0]) / (len(ends) - 1), "peak_gib": peak, figure: figures[0]}


def matmul(size: Size, gpu: bool, folder: Path) -> Figures:
    """Return the TFLOP/s of square matrix products, median of 20."""
    import torch

    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    a, b = (torch.randn(size.product, size.product, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(23):
        began = time.perf_counter()
        torch.matmul(a, b)
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return {"tflops": 2 * size.product**3 / sorted(seconds[3:])[10] / 1e12}


def liger(size: Size, gpu: bool, folder: Path) -> Figures:
    """Return what `sft` does, with the losses by Liger's kernel."""
    skip_without_liger(gpu)
    return sft(size, gpu, folder, by_liger=("loss_kernel",))


def layers(size: Size, gpu: bool, folder: Path) -> Figures:
    """Return what `sft` does, with norms, rotary positions and gated layers by Liger's kernels."""
    skip_without_liger(gpu)
    return sft(size, gpu, folder, by_liger=("layer_kernels",))


def skip_without_liger(gpu: bool) -> None:
    """Skip where Liger's kernels cannot run."""
    import_module("liger_kernel")
    if not gpu:
        raise Skipped("Liger needs a GPU")


def kept(size: Size, gpu: bool, folder: Path) -> Figures:
    """Return what `layers` does, with activations kept instead of computed again."""
    skip_without_liger(gpu)
    return sft(size, gpu, folder, by_liger=("layer_kernels",), recomputed=False)


def sft(size: Size, gpu: bool, folder: Path, by_liger: Sequence[str] = (), recomputed: bool | None = None) -> Figures:
    """Return the speed and memory of the worker's trainer on trees; `by_liger`: options of the train section."""
    from etpi_resources.trainers.contracts import SftWorkerConfig
    from etpi_resources.trainers.workers import sft_worker
    from etpi_resources.trainers.workers.collate import read_sequences
    from etpi_resources.trainers.workers.device import Compute
    from etpi_resources.trainers.workers.layer_kernels import fused_layers
    from etpi_resources.trainers.workers.reporting import CONFIG_FILE, Worker

    recomputed = gpu if recomputed is None else recomputed
    size = fitting(size, gpu, recomputed)
    write_sequences(size, folder / "sequences.parquet")
    save_tokenizer(folder / "base")
    stored = read_sequences([folder / "sequences.parquet"], "train", vocabulary=size.vocabulary, longest=32_768)
    if gpu:
        stored = stored.longest_first()
    longest = -(-int(stored.lengths().max()) // 64) * 64
    config = worker_config(folder, gpu, micro_tokens=longest, by_liger=by_liger, recomputed=recomputed)
    (folder / CONFIG_FILE).write_text(config.model_dump_json())
    model = random_model(size, gpu)
    layout = sft_worker.lay_out(stored, config, longest, model)
    assert layout.name == "trees" and layout.plan.steps == STEPS, layout.because
    trainer: Any = sft_worker.build_trainer(
        Worker(folder, SftWorkerConfig), model, layout.plan, layout.sequences,
        compute=Compute(gpu=gpu, dtype="bf16" if gpu else "fp32"), replicated=False,
    )  # fmt: skip

    def loss() -> float:
        window, trainer.window = trainer.window, type(trainer.window)()
        return window.loss()

    with fused_layers(model, required=True) if "layer_kernels" in by_liger else nullcontext():
        figures = measured(trainer, gpu, "loss", loss)
    training, shape = training_of(size, recomputed, longest)
    tokens = int(stored.lengths().sum())
    return {
        **figures,
        "layers": size.layers,
        "parameters": shape.parameters,
        "tokens_a_step": tokens,
        "tokens_a_second": tokens / figures["seconds_a_step"],
        # The usual count: 6 operations a parameter and token, whether or not activations are computed twice.
        "tflops": 6 * shape.parameters * tokens / figures["seconds_a_step"] / 1e12,
        "estimated_gib": sum(training.memory(shape).values()) / _GIB,
    }


def worker_config(
    folder: Path, gpu: bool, micro_tokens: int, shards: int = 1, by_liger: Sequence[str] = (), recomputed: bool = False
) -> Any:
    """Return the worker's config of a full fine-tuning, an epoch a step."""
    from etpi_resources.trainers.contracts import SftSettings, SftWorkerConfig

    kernels: dict[str, Any] = {"loss_kernel": "tiles", "layer_kernels": "torch", **dict.fromkeys(by_liger, "liger")}
    return SftWorkerConfig(
        label="check", base=str(folder / "base"), base_name="base", files=(str(folder / "sequences.parquet"),), seed=0,
        chat_template=None, device="auto", micro_tokens=micro_tokens, train=SftSettings(
            method="full", epochs=STEPS, max_steps=None, learning_rate=1e-6, schedule="constant", warmup_ratio=0.0,
            weight_decay=0.0, batch_tokens=10**9, batch_sequences=None, save_steps=None, use_epoch=None, use_step=None,
            stop_at_used=True, dtype="bf16" if gpu else "fp32", gradient_checkpointing=recomputed,
            optimizer="adamw_torch_fused",
            shards=shards, lora_rank=32, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", **kernels,
        ),
    )  # fmt: skip


def trl_liger(size: Size, gpu: bool, folder: Path) -> Figures:
    """Return what `trl` does, with Liger's kernels, for losses too."""
    skip_without_liger(gpu)
    return trl(size, gpu, folder, liger=True)


def trl_kept(size: Size, gpu: bool, folder: Path) -> Figures:
    """Return what `trl_liger` does, with activations kept instead of computed again."""
    skip_without_liger(gpu)
    return trl(size, gpu, folder, liger=True, recomputed=False)


def trl(size: Size, gpu: bool, folder: Path, liger: bool = False, recomputed: bool | None = None) -> Figures:
    """Return the speed and memory of TRL's SFTTrainer on a row for each turn."""
    import datasets
    from transformers import AutoTokenizer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    recomputed = gpu if recomputed is None else recomputed
    size = fitting(size, gpu, recomputed)
    rows = write_sequences(size, folder / "sequences.parquet")
    save_tokenizer(folder / "base")
    trainer = SFTTrainer(
        model=random_model(size, gpu),
        args=SFTConfig(
            output_dir=str(folder / "trl"), max_steps=STEPS, per_device_train_batch_size=1,
            gradient_accumulation_steps=len(rows), learning_rate=1e-6, optim="adamw_torch_fused",
            lr_scheduler_type="constant", max_length=None, packing=False, completion_only_loss=False, bf16=gpu,
            use_cpu=not gpu, gradient_checkpointing=recomputed, report_to="none", logging_steps=1, save_strategy="no",
            disable_tqdm=True, use_liger_kernel=liger, dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "base", local_files_only=True),
    )  # fmt: skip
    tokens = sum(len(row["input_ids"]) for row in rows)
    figures = measured(trainer, gpu, "loss")
    return {**figures, "tokens_a_step": tokens, "tokens_a_second": tokens / figures["seconds_a_step"]}


def grpo(size: Size, gpu: bool, folder: Path) -> Figures:
    """Return the seconds of a GRPO update as a tree and as rows, and of writing the weights to hand them over."""
    import torch

    from etpi_resources.trainers.workers.hand_over import save_weights

    figures: Figures = {}
    for way in ("rows", "tree"):
        trainer = group_trainer(size, gpu, folder / way, way)
        one = measured(trainer, gpu, "grad_norm")
        figures |= {f"{way}_{name}": value for name, value in one.items()}
        if way == "tree":
            began = time.perf_counter()
            model = trainer.model.get_base_model()
            save_weights(model, folder / "handed", torch.bfloat16 if gpu else torch.float32)
            figures["writing_seconds"] = time.perf_counter() - began
            figures["written_gb"] = sum(f.stat().st_size for f in (folder / "handed").iterdir()) / 1e9
        del trainer
        if gpu:
            torch.cuda.empty_cache()
    return figures


def repeat(size: Size, gpu: bool, folder: Path) -> Figures:
    """Return whether two runs with rollouts by the in-process engine are equal to the digit where the worker computes
    alike, and what a GPU's deterministic operations cost."""
    import torch

    from etpi_resources.chat.format import load_chat_format
    from etpi_resources.trainers.workers.device import Compute, compute_alike

    chat = load_chat_format("tiny")
    size = replace(size, vocabulary=max(size.vocabulary, chat.vocab_size), sample=max(size.sample // 16, 16))
    compute_alike(Compute(gpu=gpu, dtype="bf16" if gpu else "fp32"))
    one, two = (_rolled_out_and_trained(size, gpu, folder / way, chat) for way in ("one", "two"))
    torch.use_deterministic_algorithms(False)
    without = _rolled_out_and_trained(size, gpu, folder / "without", chat)
    tokens = GROUP * size.sample * STEPS
    return {
        # Where two runs part says which side of the loop does not repeat.
        **{f"{name}_equal_until_step": _equal_until(one[name], two[name]) for name in ("samples", "grad_norms")},
        "same_weights": one["weights"] == two["weights"],
        # The first run compiles, so the second is compared.
        "training_seconds": two["training_seconds"],
        "training_seconds_without": without["training_seconds"],
        "sampled_tokens_a_second": tokens / two["sampling_seconds"],
        "sampled_tokens_a_second_without": tokens / without["sampling_seconds"],
        "largest_mean_gap": max(one["gaps"]),
    }


def _equal_until(one: list[Any], two: list[Any]) -> int:
    """Return the step at which two runs differ for the first time; the number of steps if never."""
    return next((step for step, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), len(one))


def _rolled_out_and_trained(size: Size, gpu: bool, folder: Path, chat: Any) -> Figures:
    """Train a policy on samples of its own; return samples and gradient norms by step, and a hash of the weights."""
    import torch

    from etpi_resources.engines import Request, Sampler
    from etpi_resources.engines.live import LiveEngine
    from etpi_resources.trainers.policy_link import Sample

    prompt = torch.randint(
        3, size.vocabulary, (size.group_prompt,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    figures: Figures = {"samples": [], "sampling_seconds": 0.0}

    def roll_out(step: int, rows: Any) -> list[Sample]:
        sampler = Sampler(temperature=1.0, max_tokens=size.sample, seed=0)
        requests = [Request(f"{step}/{i}", f"{step}/{i}", prompt, [], sampler) for i in range(len(rows))]
        began = time.perf_counter()
        with engine.generating(step):
            answers = engine.complete(requests)
        figures["sampling_seconds"] += time.perf_counter() - began
        figures["samples"].append([(answer.output_ids, answer.logprobs) for answer in answers])
        return [
            Sample(prompt, a.output_ids or [], [1] * len(a.output_ids or []), a.logprobs or [], 0.0, (-1.0) ** i)
            for i, a in enumerate(answers)
        ]

    trainer = group_trainer(size, gpu, folder, "tree", roll_out)
    engine = LiveEngine(trainer.model.get_base_model(), "policy", chat)
    began = time.perf_counter()
    try:
        trainer.train()
    finally:
        engine.close()
    figures["training_seconds"] = time.perf_counter() - began - figures["sampling_seconds"]
    figures["gaps"] = [total / tokens for total, _, tokens, _ in trainer.gaps]
    figures["grad_norms"] = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    digest = hashlib.sha256()
    for name, weights in sorted(trainer.model.named_parameters()):
        if weights.requires_grad:
            digest.update(name.encode() + weights.detach().float().cpu().numpy().tobytes())
    figures["weights"] = digest.hexdigest()
    return figures


def group_trainer(size: Size, gpu: bool, folder: Path, way: str, roll_out: Any = None) -> Any:
    """Return TRL's trainer of one group; `way`: "rows" as TRL has them, or "tree".

    Args:
        roll_out: what returns the samples of a step; by default the same random ones every time.
    """
    import datasets
    import numpy as np
    import torch
    from peft import get_peft_model
    from transformers import AutoTokenizer

    from etpi_resources.trainers.contracts import GrpoSettings
    from etpi_resources.trainers.policy_link import Sample
    from etpi_resources.trainers.workers.checkpointing import lora_config
    from etpi_resources.trainers.workers.device import Compute
    from etpi_resources.trainers.workers.grpo_worker import trainer_arguments
    from etpi_resources.trainers.workers.policy_trainer import PolicyTrainer

    rng = np.random.default_rng(0)
    prompt, *answers = (
        rng.integers(3, size.vocabulary, count).tolist() for count in (size.group_prompt, *[size.sample] * GROUP)
    )
    samples = [
        Sample(prompt, ids, [1] * len(ids), [0.0] * len(ids), 0.0, (-1.0) ** i * (1 + i))
        for i, ids in enumerate(answers)
    ]
    settings = GrpoSettings(
        processes=1, sharded=False, distil_weight=1.0, outcome_weight=0.0, correction="none", correction_max=3.0,
        tuning="lora", temperature=1.0, steps=STEPS, group_size=GROUP, device_batch=GROUP, accumulate=1, iterations=1,
        round_size=GROUP, ahead=0,
        learning_rate=1e-6, schedule="constant", warmup_steps=0, weight_decay=0.0, optimizer="adamw_torch_fused",
        max_grad_norm=1e9, repeatable=False, loss="dapo", beta=0.0, clip_low=0.2, clip_high=0.28,
        use_bias_correction_kl=True, delta=None, importance_sampling_level="token", entropy_coef=0.0,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, correction_min=0.0, pass_tokens=None,
        max_prompt_tokens=size.group_prompt, max_response_tokens=size.sample, save_steps=None,
        use_step=None, last_step=STEPS,
        dtype="bf16" if gpu else "fp32", gradient_checkpointing=gpu, lora_rank=32, lora_alpha=16,
        lora_dropout=0.0, target_modules="all-linear",
    )  # fmt: skip
    save_tokenizer(folder / "base")
    torch.manual_seed(0)
    policy = get_peft_model(random_model(size, gpu, torch.bfloat16 if gpu else None), lora_config(settings))
    trainer: Any = PolicyTrainer(
        roll_out or (lambda step, rows: samples),
        settings,
        model=policy,
        args=trainer_arguments(settings, folder / "trl", 0, Compute(gpu=gpu, dtype="bf16" if gpu else "fp32")),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["0"] * GROUP * STEPS}),
        processing_class=AutoTokenizer.from_pretrained(folder / "base", local_files_only=True),
    )
    assert trainer.no_trees is None, trainer.no_trees
    torch.backends.cuda.enable_cudnn_sdp(way == "rows")  # TRL leaves PyTorch's choice, the engine does not
    if way == "rows":
        trainer.no_trees = "the baseline"
        trainer.model.get_base_model().set_attn_implementation("sdpa")
    return trainer


def hand_over(size: Size, gpu: bool, folder: Path) -> Figures:
    """Return the seconds in which a vLLM server starts, and takes and proves new weights."""
    import torch

    from etpi_resources.chat.format import load_chat_format
    from etpi_resources.engines import EngineUnavailable
    from etpi_resources.engines.vllm_server import vllm_program
    from etpi_resources.trainers.policy_servers import PolicyServers, ServerPlan
    from etpi_resources.trainers.workers.hand_over import Publisher

    try:
        vllm_program()
    except EngineUnavailable as error:
        raise Skipped(str(error)) from None
    chat, dtype = load_chat_format("qwen3"), torch.bfloat16 if gpu else torch.float32
    size = replace(size, vocabulary=FULL.vocabulary)
    model = random_model(size, gpu, dtype)
    model.save_pretrained(folder / "base")
    chat.save(folder / "base")
    options: dict[str, Any] = {"dtype": "bfloat16" if gpu else "float32", "max-model-len": 1024}
    options |= {"gpu-memory-utilization": 0.5} if gpu else {"enforce-eager": True}
    probe = chat.encode("def halve(n):\n    return n // 2\n" * 8)
    publisher = Publisher(model, folder / "policy", str(folder / "base"), "check", dtype, tuple(probe))
    lock = folder / "lock"
    plan = ServerPlan(folder / "base", "check", options, [{}], folder / "log", [lock], False, probe, bound=0.1)
    began = time.perf_counter()
    with PolicyServers(plan, chat) as policy:
        ready, seconds = time.perf_counter(), list[float]()
        for step in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 0.02 * step)
            began_step = time.perf_counter()
            published = publisher.publish(step, is_rank_0=True)
            assert published is not None  # of rank 0
            with policy.generating(step, published):
                seconds.append(time.perf_counter() - began_step)
    return {"start_seconds": ready - began, "hand_over_seconds": seconds[-1]}


def shards(size: Size, gpu: bool, folder: Path) -> Figures:
    """Return the speed of two processes against one, on a model of a few layers; their losses must agree."""
    import torch

    from etpi_resources.trainers.contracts import SftWorkerResult
    from etpi_resources.trainers.workers import ranks, sft_worker
    from etpi_resources.trainers.workers.reporting import CONFIG_FILE, RESULT_FILE

    if gpu and torch.cuda.device_count() < 2:
        raise Skipped("one GPU")
    size = replace(size, layers=min(size.layers, 8))
    figures: Figures = {"layers": size.layers}
    losses = {}
    for count in (1, 2):
        place = folder / str(count)
        place.mkdir()
        write_sequences(size, place / "sequences.parquet")
        random_model(size, gpu).save_pretrained(place / "base")
        save_tokenizer(place / "base")
        (place / CONFIG_FILE).write_text(worker_config(place, gpu, 10**6, count).model_dump_json())
        if status := ranks.launch_here(count, sft_worker.MODULE, place):
            raise RuntimeError(f"{count} processes ended with status {status}")
        lines = SftWorkerResult.model_validate_json((place / RESULT_FILE).read_bytes()).log
        losses[count] = [line.loss for line in lines if line.loss is not None]
        times = [line.seconds for line in lines if line.step]
        figures[f"seconds_a_step_{count}"] = (times[-1] - times[0]) / (len(times) - 1)
    figures["loss"], figures["loss_of_two"] = losses[1][0], losses[2][0]
    return figures


PARTS: dict[str, Callable[[Size, bool, Path], Figures]] = {
    "matmul": matmul, "sft": sft, "layers": layers, "liger": liger, "kept": kept, "trl": trl, "trl_liger": trl_liger,
    "trl_kept": trl_kept, "grpo": grpo, "repeat": repeat, "hand_over": hand_over, "shards": shards,
}  # fmt: skip
