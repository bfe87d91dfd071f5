"""Every entry of a config.json with another value: it is refused by its name, or the logits are those of transformers.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import seqblocks
from tests.torch.hub_models import CONFIGS, DRAWN, with_noise

pytest.importorskip("safetensors", reason="an optional extra; the test extra installs it")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of transformers about values that are unusual
IN_THE_SPEC = ("low_freq_factor", "beta_fast")  # `rotary` has entries of these names, and refuses the value itself
LEFT_OUT = ("vocab_size", "model_type", "architectures", "transformers_version", "dtype", "initializer_range")
FAMILIES = [
    pytest.param(family, marks=pytest.mark.slow if family == "gemma2" else pytest.mark.long) for family in DRAWN
]


def changed(value: Any) -> list[Any]:
    """Return other values of an entry."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [each for each in (value + 1, max(value - 1, 0), 0) if each != value]
    if isinstance(value, float):
        return [each for each in (1.7 * value, 0.0, 1.0) if each != value]
    if isinstance(value, list):
        return [value[:-1], value[::-1], None]
    return [True, 3, 0.5] if value is None else [f"{value}x", "gelu", "relu"]


def entries(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all entries."""
    for key, value in config.items():
        if isinstance(value, dict) and key not in ("id2label", "label2id"):
            yield from entries(value, (*path, key))
        elif key not in LEFT_OUT:
            yield (*path, key)


def at(config: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        config = config[key]
    return config


def saved(name: str, config: dict[str, Any], folder: Path) -> Any:
    """Save a model of transformers with this config, and return its logits, or None if the library refuses it."""
    library = pytest.importorskip("transformers", reason="needs the extra `hub`")
    try:
        given = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
        made = getattr(library, CONFIGS.get(name, f"{name}Config"))(**given)
        torch.manual_seed(1)
        model = with_noise(getattr(library, f"{name}ForCausalLM")(made)).eval()
        model.save_pretrained(folder)  # before the first pass, which changes weights of RWKV
        with torch.no_grad():
            logits = model(torch.arange(15).view(1, -1) % made.vocab_size, use_cache=False).logits
    except Exception:  # whatever the library raises
        return None
    return logits if logits.isfinite().all() and logits.any() else None


@pytest.mark.parametrize("family", FAMILIES)
def test_an_entry_with_another_value(family: str, tmp_path: Path) -> None:
    library = pytest.importorskip("transformers", reason="needs the extra `hub`")
    name, drawn, _ = DRAWN[family]
    usual = getattr(library, CONFIGS.get(name, f"{name}Config"))(**drawn(random.Random(0))).to_dict()
    usual = json.loads(json.dumps(usual))
    counted = 0
    paths = list(entries(usual))
    for path in paths:
        for number, value in enumerate(changed(at(usual, path))):
            config = copy.deepcopy(usual)
            at(config, path[:-1])[path[-1]] = value
            folder = tmp_path / f"{'.'.join(path)}-{number}"
            what = f"{'.'.join(path)} of {at(usual, path)!r} is {value!r}"
            expected = saved(name, config, folder)
            if expected is None:
                continue
            try:
                ours, refused = seqblocks.from_pretrained(folder).eval(), ""
            except seqblocks.UsageError as fault:
                ours, refused = None, str(fault)
            except seqblocks.SpecError as fault:
                ours, refused = None, str(fault)
                what = f"{what}, in the spec" if any(each in refused for each in IN_THE_SPEC) else f"no name: {what}"
            if ours is None:
                assert "in the spec" in what or any(each[-1] in refused for each in paths), f"{what}: {refused}"
                continue
            with torch.no_grad():
                found = ours(torch.arange(15).view(1, -1) % expected.shape[-1])
            # Float32, with weights that are not drawn for these sizes: ten times the bound of the other tests.
            assert (found - expected).abs().max() <= 1e-4 * expected.abs().max(), what
            counted += 1
    assert counted > 20, "entries that change nothing are compared too"
