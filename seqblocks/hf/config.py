"""The config of a model in transformers. It contains the spec with all files it uses, so config.json is sufficient."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

from seqblocks.analysis import check
from seqblocks.checkpoint.folder import config_spec
from seqblocks.checkpoint.hf_config import hub_config, sizes
from seqblocks.errors import UsageError
from seqblocks.graph import ModelSpec
from seqblocks.hf.library import CACHE, transformers


class SeqblocksConfig(transformers.PreTrainedConfig):
    """The config of a spec in transformers.

    spec: the YAML text. spec_name: its name in error messages. overrides: overridden values, by name, as YAML. files:
    the texts of all files that it uses. To create one from a bundled spec or a path, use
    `SeqblocksConfig.of("mamba_small", set={"depth": 2})`.
    """

    model_type = "seqblocks"
    keys_to_ignore_at_inference = [CACHE, "aux_loss", "router_logits"]  # noqa: RUF012 - as transformers reads it

    def __init__(
        self,
        spec: str | None = None,
        spec_name: str = "config",
        overrides: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        vocab_size: int | None = None,
        use_cache: bool = True,
        **others: Any,
    ) -> None:
        self.spec, self.spec_name = spec, spec_name
        self.overrides, self.files = overrides or {}, files or {}
        self.vocab_size, self.use_cache = vocab_size, use_cache
        self.bos_token_id = others.pop("bos_token_id", None)
        self.eos_token_id = others.pop("eos_token_id", None)
        self.pad_token_id = others.pop("pad_token_id", None)
        super().__init__(**{"tie_word_embeddings": True, **others})
        if spec is not None and vocab_size is None and not {"num_labels", "id2label"} & others.keys():
            self._derive(self.analysed())

    def _derive(self, model: ModelSpec) -> None:
        """Set the attributes of the config that transformers reads, from the sizes in the spec."""
        for name, size in sizes(model).items():
            setattr(self, name, size)

    @classmethod
    def of(
        cls, spec: str | os.PathLike[str] | ModelSpec, set: Mapping[str, Any] | None = None, **others: Any
    ) -> SeqblocksConfig:
        """Return the config of a spec: a path, the name of a bundled one, or the result of `load_model`.

        others: other entries of a config, such as eos_token_id. Raises SpecError and UsageError.
        """
        model = spec if isinstance(spec, ModelSpec) else check.load_model(spec, set)
        if model.source is None:
            raise UsageError("the model was built without the text of its spec, which a config needs")
        return cls(**{**hub_config(model), **others})

    def analysed(self, set: Mapping[str, Any] | None = None) -> ModelSpec:
        """Return the analysed spec, with further overrides. Raises SpecError and UsageError."""
        return config_spec(vars(self), set)

    def with_values(self, set: Mapping[str, Any]) -> SeqblocksConfig:
        """Return a copy whose spec has further overrides."""
        model = self.analysed(set)
        assert model.source
        changed = copy.deepcopy(self)
        changed.overrides = dict(model.source.overrides)
        changed._derive(model)
        return changed
