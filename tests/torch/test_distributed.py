"""Sharded models on two gloo processes: the same numbers as on one, and checkpoints for any number of ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import seqblocks
from seqblocks.distributed import clip_gradients, load_weights, pieces, shard, tensor_plan
from seqblocks.distributed.fsdp import layer_paths
from tests.processes import once

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ranks, on_ranks = _module("ranks"), _module("on_ranks")
RUN = [
    "nested_float32", "nested_bfloat16", "shared_float32", "master_weights", "checkpoints", "refused_folder",
    "refused_weights", "split_model", "both_ways", "pipelined", "parts_of_sequences", "experts_without_tokens",
    "disagreements",
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return the result of each function on each rank. One pair of processes runs all functions."""
    return once(tmp_path_factory, "distributed", lambda folder: ranks.run_ranks(HERE / "on_ranks.py", RUN, folder))


def _result(results: dict[str, list[Any]], name: str) -> Any:
    """Return the first rank's result, or fail with the output of the ranks."""
    errors = [text for found in results.values() for text in found if isinstance(text, str)]
    assert not errors, "\n".join(errors)
    return results[name][0]


def _one_process(text: str, dtype: str, weights: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of one process in `dtype`, from weights representable in `weights`."""
    model = seqblocks.build_text(text, dtype=weights).to(getattr(torch, dtype))
    loss = on_ranks.loss_of(model, on_ranks.tokens())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["nested", "shared"])
def test_loss_and_gradients_are_those_of_one_process(results, name):
    found = _result(results, f"{name}_float32")
    loss, gradients = _one_process(on_ranks.SPECS[name], "float32", "float32")
    assert found["drawn otherwise"] == []
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()))


def test_half_precision_is_as_exact_as_on_one_process(results):
    """Compared with float64 and the same weights: the error of one process, plus two more roundings of each gradient.
    """
    found = _result(results, "nested_bfloat16")
    text = on_ranks.SPECS["nested"]
    exact_loss, exact = _one_process(text, "float64", "bfloat16")
    one = seqblocks.build_text(text, dtype="bfloat16")
    loss = on_ranks.loss_of(one, on_ranks.tokens())
    loss.backward()
    assert found["drawn otherwise"] == []
    assert abs(found["loss"] - exact_loss) <= 2 * abs(loss.item() - exact_loss) + 2**-8 * exact_loss
    for name, parameter in one.named_parameters():
        largest = float(exact[name].abs().max())
        own = float((parameter.grad - exact[name]).abs().max())
        error = float((found["gradients"][name] - exact[name]).abs().max())
        assert error <= 2 * own + 2 * 2**-8 * largest, name
        assert found["gradients"][name].dtype == parameter.dtype


def test_master_weights_train_and_float32_parameters_stay_so(results):
    losses, seen, kinds = _result(results, "master_weights")
    assert losses[2] < losses[1] < losses[0]
    assert seen == {"A_log": torch.float32, "x": torch.bfloat16, "output": torch.bfloat16}
    assert kinds == {"torch.float32"}


def test_experts_without_tokens_on_a_rank_get_their_gradients_in_eval_mode(results):
    found, wrong = _result(results, "experts_without_tokens")
    model = on_ranks.with_chosen_experts(seqblocks.build_text(on_ranks.EXPERTS, dtype="float64"))
    model(on_ranks.routed_tokens([0, 1, 2, 0, 1, 3])).square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-12, atol=1e-14, msg=name)
    assert max(wrong.values()) < 1e-14, wrong


def test_weights_and_inputs_that_differ_between_ranks_are_errors_on_all(results):
    errors = _result(results, "disagreements")
    weights = "UsageError: the weights of the ranks differ, in 2 of 2 parameters, such as linear.weight: build"
    assert [name for name, error in errors.items() if error.startswith(weights)] == [
        "split", "sharded", "parts of a sequence",
    ]  # fmt: skip
    assert "3 of 3 parameters, such as linear.bias" in errors["8 bits"]  # bias, values and scale
    assert "linear.bias is float32 [4] on one and float32 [4] without gradients on another" in errors["one is frozen"]
    assert "layer_norm.weight is float32 [4] on one and missing on another" in errors["another model"]
    for name in ("sharded over the ranks of its parts", "parts of a sequence for parts of a model"):
        assert "hold different parts of the model (tensor_parallel)" in errors[name]
    assert "cut it into stages first" in errors["stage of a part"]
    assert "cut it into stages first" in errors["stage of a shard"]
    assert "pass the same seed on all ranks" in errors["seed"]
    inputs = {
        "tokens": "x", "lengths": "x", "resets": "x, resets", "one token": "x", "samples": "x", "features": "x",
        "context": "context", "bounds": "cu_seqlens",
    }  # fmt: skip
    for name, given in inputs.items():
        assert errors[name].startswith(f"RunError: the inputs of the ranks differ ({given}): pass the same"), name
    assert results["disagreements"][1] == errors


def test_checkpoints_go_from_two_ranks_to_one_and_back(results):
    assert _result(results, "checkpoints") == []


def test_a_folder_that_the_first_rank_cannot_write_is_an_error_on_all(results):
    _result(results, "refused_folder")
    first, second = results["refused_folder"]
    assert first == ("UsageError", "/file/model cannot be written: Not a directory")
    assert second == ("RunError", f"the first rank failed: UsageError: {first[1]}")


def test_weights_that_one_rank_cannot_read_are_an_error_on_all(results):
    _result(results, "refused_weights")
    for first, second in zip(*results["refused_weights"], strict=True):  # a sharded and a split model
        assert first[0] == second[0] == 0, "the extra of the first rank is written"
        (_, missing), (_, damaged) = second[1:]
        assert missing.startswith("missing does not exist; load needs a folder")
        assert damaged.startswith("damaged has changed since it was written")
        assert second[1:] == [("UsageError", missing), ("UsageError", damaged)]
        assert first[1:] == [("RunError", f"another rank failed: UsageError: {text}") for text in (missing, damaged)]


def test_a_model_that_is_split_over_ranks_computes_what_one_does(results):
    wrong, changed = _result(results, "split_model")
    assert changed == []
    assert {name: error for name, error in wrong.items() if error > 1e-12} == {}  # float64: sums in another order


def test_split_models_can_be_sharded(results):
    loss, gradients, changed = _result(results, "both_ways")
    expected, exact = _one_process(on_ranks.SPECS["split"], "float32", "float32")
    assert changed == []
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, gradient in exact.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()))


def test_gradients_of_shards_are_summed_over_the_parts_of_a_sequence(results):
    gradients, error = _result(results, "parts_of_sequences")
    _, exact = _one_process(on_ranks.SPECS["stages"], "float32", "float32")
    assert gradients.keys() == exact.keys()
    for name, gradient in exact.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()))
    assert error.startswith("the gradients of these ranks are reduced already: leave out sum_gradients")


def test_stages_of_a_pipeline_compute_what_the_model_does(results):
    _result(results, "pipelined")
    (_, first), (losses, second) = results["pipelined"]
    loss, exact = _one_process(on_ranks.SPECS["stages"], "float64", "float64")
    assert sum(losses) / len(losses) == pytest.approx(loss, rel=1e-12)
    assert first.keys() | second.keys() == exact.keys()
    assert not first.keys() & second.keys()
    for name, gradient in (first | second).items():
        torch.testing.assert_close(gradient, exact[name], rtol=0, atol=1e-12 * float(exact[name].abs().max()))


@pytest.mark.long
def test_bundled_models_are_split_exactly(tmp_path):
    results = ranks.run_ranks(HERE / "on_ranks.py", ["bundled_models"], tmp_path)
    wrong = _result(results, "bundled_models")
    assert {name: error for name, error in wrong.items() if not error < 1e-11} == {}


def test_layers_of_repeats_are_groups_inner_ones_first():
    model = seqblocks.build_text(on_ranks.SPECS["nested"], device="meta")
    assert list(layer_paths(model.graph)) == ["outer.0.inner.0", "outer.0.inner.1", "outer.0"]


def test_without_a_process_group_the_error_says_how_to_start_one():
    model = seqblocks.build_text(on_ranks.SPECS["nested"], device="meta")
    with pytest.raises(seqblocks.UnavailableError, match="torchrun"):
        shard(model)
    with pytest.raises(seqblocks.UsageError, match="or a stage of one, not Linear"):
        shard(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("path", [3, None, ["a"], "a\0b"])
def test_invalid_paths(path: Any) -> None:
    with pytest.raises(seqblocks.UsageError, match="path"):
        load_weights(seqblocks.build_text(on_ranks.SPECS["nested"], device="meta"), path)


def test_arguments_of_other_types() -> None:
    model = seqblocks.build_text(on_ranks.SPECS["nested"], device="meta")
    with pytest.raises(seqblocks.UsageError, match=r"load_model, or model\.spec, not str"):
        tensor_plan("nested", 2)  # type: ignore[arg-type]
    with pytest.raises(seqblocks.UsageError, match="pieces takes a state dict, not NoneType"):
        pieces(model, None)  # type: ignore[arg-type]
    for norm in ("1", None, -1.0, float("nan"), torch.ones(2)):
        with pytest.raises(seqblocks.UsageError, match="max_norm must be a number of at least 0, not"):
            clip_gradients(model, norm)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_without_a_norm_are_clipped_as_by_torch(value: float) -> None:
    """One that is not a number makes all of them so, and no step is taken with the rest."""
    models = [seqblocks.build_text(on_ranks.FEATURES, seed=0) for _ in range(2)]
    for model in models:
        model(torch.ones(1, 2, 4)).sum().backward()
        model.linear.bias.grad[0] = value
    clip_gradients(models[0], 1.0)
    torch.nn.utils.clip_grad_norm_(models[1].parameters(), 1.0)
    for p, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(p.grad, other.grad, equal_nan=True)
