"""Training with other packages: torchtitan's protocol of models, and the Lightning module of docs/distributed.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import seqblocks
from seqblocks.distributed import titan

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
SMALL = {"dim": 32, "depth": 1}


def test_without_torchtitan_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.setitem(sys.modules, "torchtitan.protocols.model_spec", None)
    with pytest.raises(seqblocks.UnavailableError, match=r"pip install 'seqblocks\[torchtitan\]'"):
        titan.model_spec("hybrid_small")


def test_a_spec_follows_torchtitans_protocol():
    pytest.importorskip("torchtitan", reason="needs the extra `torchtitan`")
    spec = titan.model_spec("hybrid_small", set=SMALL, seed=3)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    model.init_weights(buffer_device=None)
    one = seqblocks.build("hybrid_small", set=SMALL, seed=3)
    assert {name: p.tolist() for name, p in model.state_dict().items()} == {
        name: p.tolist() for name, p in one.state_dict().items()
    }
    count, operations = spec.model.get_nparams_and_flops(model, 16)
    assert count == sum(p.numel() for p in one.parameters())
    assert operations > 6 * 32 * 256
    x, positions = torch.randint(0, 256, (1, 8)), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    torch.testing.assert_close(model(x, positions=positions), one(x, resets=positions == 0))


def groups_by_decay(optimizers):
    """Return the names of the parameters with each weight decay."""
    found = {}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        found.setdefault(group["weight_decay"], set()).update(group["param_names"])
    return found


def test_weight_decay_in_torchtitan_spares_what_the_spec_exempts():
    model = seqblocks.build("hybrid_small", set=SMALL)
    names = dict(model.named_parameters())
    exempt = {id(p) for p in model.parameter_groups()[1]["params"]}
    of_layers = [name for name in names if name.startswith("layers")]
    others = [name for name in names if not name.startswith("layers")]
    kinds = (torch.optim.AdamW, torch.optim.SGD)
    optimizers = [
        kind([{"params": [(n, names[n]) for n in of_layers], "weight_decay": 0.1, "lr": 0.5},
              {"params": [(n, names[n]) for n in others], "weight_decay": decay}], lr=0.1)
        for kind, decay in zip(kinds, (0.2, 0.0), strict=True)
    ]  # fmt: skip
    titan.exempt_from_decay(optimizers[:1], [model], None)
    found = groups_by_decay(optimizers[:1])
    assert found[0.0] == {name for name, p in names.items() if id(p) in exempt}
    assert found == {0.0: found[0.0], 0.1: names.keys() - found[0.0]}, "outside of the layers, all are exempt"
    for group in optimizers[0].param_groups:
        assert [id(names[name]) for name in group["param_names"]] == [id(p) for p in group["params"]]
        assert group["lr"] == (0.5 if group["param_names"][0].startswith("layers") else 0.1)
    titan.exempt_from_decay(optimizers, [model])
    assert groups_by_decay(optimizers[:1]) == found, "a second call should change nothing"
    assert set(groups_by_decay(optimizers[1:])) == {0.1, 0.0}


def test_torchtitan_is_given_the_groups():
    pytest.importorskip("torchtitan", reason="needs the extra `torchtitan`")
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    spec = titan.model_spec("hybrid_small", set=SMALL)
    with torch.device("meta"):
        model = spec.model.build()
    every = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1, "weight_decay": 0.1})
    config = OptimizersContainer.Config(param_groups=[every], implementation="foreach")
    built = config.build(model_parts=[model])
    spec.post_optimizer_build_fn(built, [model], None)
    exempt = {id(p) for p in model.parameter_groups()[1]["params"]}
    assert groups_by_decay(built)[0.0] == {name for name, p in model.named_parameters() if id(p) in exempt}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_of_torchtitan_is_read_and_written_by_one_process(tmp_path):
    pytest.importorskip("torchtitan")
    from torch.distributed import checkpoint as dcp
    from torchtitan.components.checkpointer.base import ModelWrapper

    with torch.device("meta"):
        trained = titan.model_spec("hybrid_small", set=SMALL).model.build()
    trained.to_empty(device="cpu")
    trained.init_weights(buffer_device=None)
    model = seqblocks.build("hybrid_small", set=SMALL, seed=9)
    begun = {name: p.clone() for name, p in model.state_dict().items()}
    dcp.save(ModelWrapper(trained).state_dict(), checkpoint_id=tmp_path / "step-4")
    dcp.save(begun, checkpoint_id=tmp_path / "start")
    weights = model.state_dict()
    dcp.load(weights, checkpoint_id=tmp_path / "step-4")
    model.load_state_dict(weights)
    assert all(torch.equal(p, trained.state_dict()[name]) for name, p in model.state_dict().items())
    initial = ModelWrapper(trained).state_dict()
    dcp.load(initial, checkpoint_id=tmp_path / "start")
    assert all(torch.equal(p, begun[name]) for name, p in trained.state_dict().items())


def test_the_lightning_module_of_the_page_trains(tmp_path, monkeypatch):
    lightning = pytest.importorskip("lightning", reason="needs lightning, which no extra installs")
    code = re.search(r"```text\n# lightning_module.py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[1]
    assert len(code.splitlines()) < 30
    space: dict[str, object] = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), space)
    module = space["LanguageModel"]("mamba_small", lr=1e-2, dim=16, depth=1)
    batches = torch.randint(0, 256, (1, 2, 9)).repeat(4, 1, 1)
    monkeypatch.chdir(tmp_path)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    losses: list[float] = []
    module.log = lambda name, loss: losses.append(loss.item())
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    assert losses[-1] < losses[0]
