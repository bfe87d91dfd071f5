"""The Trainer of transformers on models of specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.modelcard import TrainingSummary

import seqblocks
import seqblocks.hf as hf

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

ROWS = torch.randint(0, 16, (12, 6), generator=torch.Generator().manual_seed(2))
DATA = [{"input_ids": row, "labels": row} for row in ROWS]
# A tied embedding, parameters in full precision, two layers.
TEXT = """
seqblocks: 1
use: [mamba]
model:
  input: {tokens: 16}
  steps:
    - embed: {features: 8}
    - repeat: {name: layers, times: 2, steps: [mamba_block: {dim: 8, layers: 2, state: 4}]}
    - rms_norm: {name: norm}
    - unembed: {bias: false, tie: embed}
"""


class InOrder(Trainer):
    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(DATA)


def trainer(folder: Path, model: Any, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder), max_steps=6, per_device_train_batch_size=2, learning_rate=0.01, lr_scheduler_type="constant",
        max_grad_norm=0, logging_steps=1, save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
        **options,
    )  # fmt: skip
    return InOrder(model, arguments, train_dataset=DATA, eval_dataset=DATA[:4])


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    folder = tmp_path_factory.mktemp("trained")
    run = trainer(folder, hf.wrap(seqblocks.build_text(TEXT, seed=0)))
    run.train()
    return folder, run


def test_losses_are_those_of_a_loop(done: tuple[Path, Trainer]) -> None:
    model = seqblocks.build_text(TEXT, seed=0).train()
    optimiser = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0)
    expected = []
    for batch in ROWS.split(2):
        logits = model(batch)[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
        expected.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    torch.testing.assert_close(losses(done[1]), expected, rtol=1e-4, atol=1e-4)
    assert done[1].evaluate()["eval_loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("shards", [False, True])
def test_training_is_resumed(done: tuple[Path, Trainer], tmp_path: Path, shards: bool) -> None:
    folder, whole = done
    checkpoint = folder / "checkpoint-3"
    if shards:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        model.save_pretrained(checkpoint, max_shard_size="8KB")
    run = trainer(tmp_path, hf.wrap(seqblocks.build_text(TEXT, seed=9)))
    loaded: list[Any] = []
    run._issue_warnings_after_load = loaded.append  # type: ignore[method-assign]
    run.train(resume_from_checkpoint=str(checkpoint))
    if not shards:
        assert not loaded[0].missing_keys, "the file should have one copy of a tied parameter"
    assert not loaded[0].unexpected_keys or shards
    torch.testing.assert_close(losses(run)[-3:], losses(whole)[-3:], rtol=1e-5, atol=1e-5)
    assert run.model.model.unembed.weight is run.model.model.embed.weight


def test_a_checkpoint_is_a_folder_of_ours(done: tuple[Path, Trainer]) -> None:
    folder, run = done
    last = seqblocks.load(folder / "checkpoint-6")
    for name, value in run.model.model.state_dict().items():
        assert torch.equal(last.state_dict()[name], value)


@pytest.mark.slow
def test_activations_are_computed_again(done: tuple[Path, Trainer], tmp_path: Path) -> None:
    model = hf.wrap(seqblocks.build_text(TEXT, seed=0))
    model.activation_checkpointing_enable()
    run = trainer(tmp_path, model, save_strategy="no")
    run.train()
    torch.testing.assert_close(losses(run), losses(done[1]), rtol=1e-5, atol=1e-5)


def loss_of(folder: Path, model: Any, **options: Any) -> float:
    run = trainer(folder, model.eval(), **options)
    loss: torch.Tensor = run.compute_loss(model, {"input_ids": ROWS, "labels": ROWS})
    return loss.item()


def test_smoothed_labels_are_shifted(tmp_path: Path) -> None:
    """The Trainer knows from a table of class names whether labels are those of the next token."""
    model = hf.wrap(seqblocks.build_text(TEXT, seed=0))
    plain = loss_of(tmp_path, model)
    assert loss_of(tmp_path, model, label_smoothing_factor=1e-9) == pytest.approx(plain, rel=1e-5)
    scores = -model(ROWS).logits[:, :-1].log_softmax(-1)
    expected = 0.9 * plain + 0.1 * scores.mean().item()
    assert loss_of(tmp_path, model, label_smoothing_factor=0.1) == pytest.approx(expected, rel=1e-5)


def test_model_cards_name_the_task(tmp_path: Path) -> None:
    images = hf.wrap(seqblocks.build("vil_digits", set={"dim": 16, "depth": 2}, seed=0))
    texts = hf.wrap(seqblocks.build_text(TEXT, seed=0))
    for model, task in ((images, "image-classification"), (texts, "text-generation")):
        assert TrainingSummary.from_trainer(trainer(tmp_path, model)).tasks == task


@pytest.mark.parametrize("name", ["hybrid_small", "jamba_small"])
def test_the_trainer_decays_what_parameter_groups_does(tmp_path: Path, name: str) -> None:
    model = hf.wrap(seqblocks.build(name, set={"dim": 16}, seed=0))
    parametrize.register_parametrization(model.model.embed, "weight", torch.nn.Identity())
    model.adapter = torch.nn.ModuleDict({"linear": torch.nn.Linear(2, 2), "norm": torch.nn.LayerNorm(2)})
    run = trainer(tmp_path, model, weight_decay=0.1)
    decayed, plain = ({id(p) for p in group["params"]} for group in model.model.parameter_groups())
    added = model.adapter["linear"]
    decayed.add(id(added.weight))
    plain |= {id(added.bias), *map(id, model.adapter["norm"].parameters())}
    run.create_optimizer()
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.1, 0]
    assert [{id(p) for p in group["params"]} for group in run.optimizer.param_groups] == [decayed, plain]
    other = torch.nn.ModuleDict({"linear": torch.nn.Linear(2, 2), "norm": torch.nn.LayerNorm(2)})
    assert run.get_decay_parameter_names(other) == ["linear.weight"]


def test_images_are_classified(tmp_path: Path) -> None:
    model = hf.wrap(seqblocks.build("vil_digits", set={"dim": 16, "depth": 2}, seed=0))
    data = [{"pixel_values": torch.randn(1, 8, 8), "labels": at % 10} for at in range(4)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    run = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    run.train()
    assert len(losses(run)) == 2
    assert run.predict(data).predictions.shape == (4, 10)


@pytest.mark.slow
def test_columns_of_other_inputs(tmp_path: Path) -> None:
    """The Trainer drops columns that are not arguments of `forward` by name, unless it is set not to."""
    text = """
    seqblocks: 1
    model:
      inputs: {text: {tokens: 16}, mood: {vector: 3}}
      steps:
        - linear: {from: mood, features: 8, as: m}
        - embed: {from: text, features: 8}
        - multiply: {by: m}
        - unembed
    """
    data = [{**row, "mood": torch.ones(3)} for row in DATA]
    options: dict[str, Any] = {"max_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    for kept in (False, True):
        model = hf.wrap(seqblocks.build_text(text, seed=0))
        run = Trainer(model, TrainingArguments(str(tmp_path), remove_unused_columns=not kept, **options), None, data)
        if kept:
            assert run.train().global_step == 1
        else:
            with pytest.raises(seqblocks.RunError, match=r"also needs mood: pass mood=….*remove_unused_columns=False"):
                run.train()


@pytest.mark.slow
def test_noise_on_the_embedding(done: tuple[Path, Trainer], tmp_path: Path) -> None:
    """NEFTune adds noise to what the embedding returns, by a hook, and removes the hook after training."""
    run = trainer(tmp_path, hf.wrap(seqblocks.build_text(TEXT, seed=0)), neftune_noise_alpha=5.0)
    run.train()
    assert losses(run)[0] != losses(done[1])[0]
    assert not run.model.get_input_embeddings()._forward_hooks
