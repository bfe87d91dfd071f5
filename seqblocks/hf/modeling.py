"""Models of specs as models of transformers: causal language models, image classifiers, and feature extractors."""

from __future__ import annotations

import builtins
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
    ImageClassifierOutput,
    ModelOutput,
    MoeCausalLMOutputWithPast,
)
from transformers.utils.generic import can_return_tuple

from seqblocks import graph
from seqblocks.checkpoint import hf_config
from seqblocks.checkpoint.record import as_disk_errors
from seqblocks.errors import RunError, UsageError, listing
from seqblocks.graph import ModelSpec
from seqblocks.hf import arguments, files, routing
from seqblocks.hf.cache import Recorded, StateCache
from seqblocks.hf.config import SeqblocksConfig
from seqblocks.hf.layers import record_layers
from seqblocks.hf.library import CACHE, transformers
from seqblocks.hf.masks import resets_of
from seqblocks.model.builder import build_model
from seqblocks.model.quantize import quantized
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.initialise import draw
from seqblocks.runtime.repeat import checkpoint_layers, has_checkpointed_layers
from seqblocks.state import States
from seqblocks.streaming.generate import CHUNK

MAIN_INPUTS = {"tokens": "input_ids", "image": "pixel_values"}  # by kind; of others: inputs_embeds


class Ran(NamedTuple):
    """The results of a call: the output, the cache, `hidden_states`, and what the routers of experts add.

    routing: further entries of the output. penalty: the weighted balance losses, to be added to the loss.
    """

    y: Any
    cache: StateCache | None
    hidden_states: tuple[Tensor, ...] | None
    routing: Mapping[str, Any] = MappingProxyType({})
    penalty: Tensor | None = None


class SeqblocksPreTrainedModel(transformers.PreTrainedModel):
    """Base of the model classes. `model` is the built model, as returned by `seqblocks.build(…)`.

    set: overrides of the config's spec. Weights are initialised as in `build_model`, with torch's global generator.
    """

    config_class = SeqblocksConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Body"]  # noqa: RUF012 - a layer of a repeat
    _skip_keys_device_placement = [CACHE]  # noqa: RUF012

    def __init__(
        self, config: SeqblocksConfig, set: Mapping[str, Any] | None = None, model: SequenceModel | None = None
    ) -> None:
        if set:
            config = config.with_values(set)
        spec = config.analysed() if model is None else model.spec
        self.check_fit(spec, config)
        super().__init__(config)
        self.model = model or build_model(
            self.part(spec), device=torch.empty(0).device, dtype=torch.get_default_dtype(), seed=None
        )
        routing.complete(self.config, self.model)
        spare = _names(spec) - _names(self.model.spec)
        self._keys_to_ignore_on_load_unexpected = [rf"^(model\.)?{re.escape(name)}$" for name in sorted(spare)]
        for parameter in self.model.parameters():
            if not parameter.is_meta:
                _mark_drawn(parameter)
        own = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}  # without matrices in 8 bits
        tied = {item.name: item.tied for item in graph.parameters(self.model.graph) if item.tied}
        self._tied_weights_keys = {f"model.{name}": f"model.{source}" for name, source in tied.items() if name in own}
        self.register_load_state_dict_pre_hook(files.adapt_names)
        self._inputs = list(self.model.spec.inputs) or [""]
        self._causal = hf_config.is_causal(self.model.spec)
        self._has_vectors = hf_config.has_vectors(self.model.spec)
        self.post_init()

    @classmethod
    def check_fit(cls, spec: ModelSpec, config: SeqblocksConfig) -> None:
        """Raise UsageError if this class cannot run a spec."""
        main = MAIN_INPUTS.get(spec.input.kind, "inputs_embeds")
        other_inputs = {*MAIN_INPUTS.values(), "inputs_embeds"} - {main}
        taken = {*inspect.signature(cls.forward).parameters} - other_inputs - {"kwargs"}
        taken |= arguments.IN_KWARGS
        if names := [name for name in list(spec.inputs)[1:] if name in taken]:
            what = f"an input of {spec.name} cannot be named {names[0]} in transformers"
            raise UsageError(f"{what}: calls of its models have an argument of that name. Rename it in the spec")

    @classmethod
    def part(cls, spec: ModelSpec) -> ModelSpec:
        """Return the part of a spec that this class runs."""
        return spec

    @classmethod
    def _loaded_part(cls, config: Any, set: Mapping[str, Any] | None) -> tuple[ModelSpec, builtins.set[str]]:
        """Return the part of a config's spec that this class runs, and the names of the weights that it skips."""
        if not isinstance(config, SeqblocksConfig):
            config = SeqblocksConfig.from_pretrained(config)
        config = config.with_values(set) if set else config
        spec = config.analysed()
        cls.check_fit(spec, config)
        return cls.part(spec), _names(spec) - _names(cls.part(spec))

    # --- weights ---

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Return a model with the weights of a folder or of a repository of the Hub; see transformers.

        set={…} overrides values of its spec. Raises RunError if weights are missing, unused or of another shape, and
        UsageError for damaged files, instead of initialising parameters at random.
        """
        files.check_folder(path, kwargs, functools.partial(cls._loaded_part, set=kwargs.get("set")))
        model, info = files.explained(super().from_pretrained)(path, *args, output_loading_info=True, **kwargs)
        files.check_loaded(path, info)
        return (model, info) if output_loading_info else model

    def save_pretrained(
        self, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **kwargs: Any
    ) -> None:
        """Write a folder for `from_pretrained`, and for `seqblocks.load` if it contains all weights of the spec.

        Arguments as in transformers. Raises OSError for disk errors.
        """
        adapted = getattr(self, "_hf_peft_config_loaded", False)
        if quantized(self.model) and not adapted:
            raise UsageError("transformers reads no weights in 8 bits: save it by seqblocks.save(model.model, DIR)")
        folder = files.as_folder(save_directory)
        if not adapted:
            state_dict = files.own_names(self, self.state_dict() if state_dict is None else state_dict)
        before = files.weight_files(folder)
        with as_disk_errors(folder):
            super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        if is_main_process and not adapted and not kwargs.get("variant"):  # which leaves the usual files as they are
            files.remove_stale(folder, before)
            files.write_record(folder, self.config.analysed())

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the parameters of a module that are missing in the files, if the caller allows that."""
        new = [p for p in module.parameters(recurse=False) if not getattr(p, "_is_hf_initialized", False)]
        if not new:
            return
        names = files.parameter_names(self.model)
        declared = {item.name: item.parameter for item in graph.parameters(self.model.graph)}
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        for parameter in new:
            name = names[id(parameter)]
            draw(parameter, name, declared[name], seed)
            _mark_drawn(parameter)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model was built in; some parameters of a half-precision model are float32."""
        return self.model.own_dtype()

    # --- its parts ---

    def get_input_embeddings(self) -> nn.Module | None:
        """Return the step that reads the tokens, or None."""
        node = hf_config.embedding(self.model.spec)
        return None if node is None else self.model.get_submodule(node.name)

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the step that reads the tokens. Raises RunError if the sizes of the new module differ."""
        self._replace(hf_config.embedding(self.model.spec), value)

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the step that computes the logits, or None."""
        node = hf_config.head(self.model.spec)
        return None if node is None else self.model.get_submodule(node.name)

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the step that computes the logits. Raises RunError if the sizes of the new module differ."""
        self._replace(hf_config.head(self.model.spec), value)

    def _replace(self, node: graph.Node | None, value: Any) -> None:
        if node is None:
            raise RunError(f"{self.model.spec.name} has no embedding or head of this kind to replace")
        expected = list(node.parameters["weight"].shape)
        found = list(value.weight.shape) if isinstance(getattr(value, "weight", None), Tensor) else type(value).__name__
        if found != expected:
            what = f"{node.name}.weight must have the shape {expected} of the spec, not {found}"
            raise RunError(f"{what}. {self._resizing()}")
        self.model.register_module(node.name, value)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return the input embeddings. Raises RunError for another size, which the spec must define."""
        if new_num_tokens not in (None, self.config.vocab_size):
            what = f"the spec sets a vocabulary of {self.config.vocab_size} tokens"
            raise RunError(f"{what}, which cannot be resized to {new_num_tokens}. {self._resizing()}")
        return self.get_input_embeddings()

    def _resizing(self) -> str:
        how = "from_pretrained(DIR, set={'vocabulary': N}, ignore_mismatched_sizes=True)"
        return f"Load it in another size, with the argument's name in the spec: {how} initialises the resized weights"

    def enable_input_require_grads(self) -> None:
        """Make the embeddings require gradients, which adapters with checkpointing need."""
        embeddings = self.get_input_embeddings()
        if embeddings is None:
            raise RunError(f"{self.model.spec.name} has no step `embed` that reads its input")
        self._require_grads_hook = embeddings.register_forward_hook(_require_grads)
        self._require_grads_hooks = [self._require_grads_hook]

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        found = checkpoint_layers(self.model, gradient_checkpointing_func if enable else None, every_n_layers)
        if enable and not found:
            raise RunError(f"{self.model.spec.name} has no `repeat` step, so there are no layers to checkpoint")

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether activations are recomputed in the backward pass."""
        return has_checkpointed_layers(self.model)

    # --- running ---

    def _output(self, y: Any) -> Any:
        """Return the logits if a model has several outputs, otherwise its output."""
        return y[hf_config.logits_name(self.model.spec)] if isinstance(y, dict) else y

    def _context(self, given: dict[str, Any]) -> dict[str, Tensor]:
        """Return the inputs that do not stream, by their names in the spec. Raises RunError for unknown arguments."""
        context = {name: given.pop(name) for name in self._inputs[1:] if given.get(name) is not None}
        unknown = [name for name, value in given.items() if value is not None and value is not False]
        if unknown:
            raise RunError(f"{self.model.spec.name} takes no {listing(unknown)}{arguments.reason(unknown[0])}")
        return context

    def _option(self, given: dict[str, Any], name: str) -> bool:
        """Return an argument of a call, by default that of the config."""
        value = given.pop(name, None)
        return bool(getattr(self.config, name) if value is None else value)

    def _run(
        self, x: Any, mask: Any, positions: Any, cache: Any, use_cache: bool | None, logits_to_keep: Any,
        given: dict[str, Any],
    ) -> Ran:
        """Run the model, and return at least the requested outputs."""
        observes = self._option(given, "output_hidden_states")
        has_experts = self.model.has_experts
        shows_routing = has_experts and self._option(given, "output_router_logits")
        features: dict[int, Tensor] | None = None
        if observes or shows_routing:
            observed = record_layers(self.model) if observes else nullcontext()
            with observed as features, routing.recording(self.model, shows_routing):
                y, cache = self._call(x, mask, positions, cache, use_cache, 0, given)
        else:
            y, cache = self._call(x, mask, positions, cache, use_cache, logits_to_keep, given)
        hidden = None if features is None else tuple(features[at] for at in sorted(features))
        if not has_experts or not (self.training or shows_routing):
            return Ran(y, cache, hidden)
        return Ran(y, cache, hidden, *routing.results(self.model, self.config, mask, shows_routing))

    def _call(
        self, x: Any, mask: Any, positions: Any, cache: Any, use_cache: bool | None, logits_to_keep: Any,
        given: dict[str, Any],
    ) -> tuple[Any, StateCache | None]:
        if cache is not None and not isinstance(cache, StateCache):
            raise RunError(f"{CACHE} must be a StateCache from an earlier call, not {type(cache).__name__}")
        if x is None:
            raise RunError(f"{self.model.spec.name} needs its input, {self.main_input_name}")
        context = self._context(given)
        missing = [name for name in self._inputs[1:] if name not in context]
        if missing and cache is None:
            given_by = f"pass {', '.join(f'{name}=…' for name in missing)}"
            columns = "the Trainer passes such columns with TrainingArguments(remove_unused_columns=False)"
            raise RunError(f"{self.model.spec.name} also needs {listing(missing)}: {given_by}; {columns}")
        streams = cache is not None or bool(use_cache)
        resets = None
        if mask is not None or positions is not None:
            arguments.check_tokens(x, self.model.spec)
            past = cache.get_seq_length() if cache else 0
            one = isinstance(logits_to_keep, int) and logits_to_keep == 1
            reads_last = streams or one or self._has_vectors
            resets = resets_of(x, mask, positions, past, self._causal, reads_last)
        if streams:
            y, cache = self._stream(x, resets, cache or StateCache(), logits_to_keep, context)
            return y, cache if use_cache is not False else None
        if len(self._inputs) > 1:
            return self._output(self.model(x, resets=resets, **context)), None
        return self._output(self.model(x, resets=resets)), None

    def _stream(
        self, x: Tensor, resets: Tensor | None, cache: StateCache, outputs: Any, context: dict[str, Tensor]
    ) -> tuple[Any, StateCache]:
        """Read tokens after those of a cache. A long prompt is read in chunks if few outputs are needed."""
        state, record = cache.state, cache.recorded
        if state is None and record is not None:  # after `crop`, the remaining tokens are read again
            state = record.state
            if record.tokens.shape[1]:
                _, state = self._read(record.tokens, record.resets, state)
            record = None
        if context and state is None:
            state = self.model.init_state(x.shape[0], None, None, **context)
        lead = x.shape[1] - outputs if isinstance(outputs, int) and outputs and not torch.is_grad_enabled() else 0
        if lead < CHUNK and not cache.recording:
            lead = 0
        for start in range(0, lead, CHUNK):
            span = slice(start, min(start + CHUNK, lead))
            _, state = self._read(x[:, span], None if resets is None else resets[:, span], state)
        rest, marks = (x[:, lead:], None if resets is None else resets[:, lead:]) if lead > 0 else (x, resets)
        if cache.recording:
            record = record.extended(rest, marks) if record and lead <= 0 else Recorded(state, rest, marks)
        y, state = self._read(rest, marks, state)
        after = StateCache(state, cache.seen + x.shape[1], record)
        after.recording = cache.recording
        return y, after

    def _read(self, x: Tensor, resets: Tensor | None, state: States | None) -> tuple[Any, States]:
        if x.shape[1] == 1 and state is not None and not self.model.keeps_routing:
            y, state = self.model.step(x[:, 0], state, resets=None if resets is None else resets[:, 0])
            y = self._output(y)
            if isinstance(y, Tensor):
                return y.unsqueeze(1), state
            with_tokens = self.model.token_outputs
            return {name: each.unsqueeze(1) if name in with_tokens else each for name, each in y.items()}, state
        y, state = self.model(x, state=state, return_state=True, resets=resets)
        return self._output(y), state


def _mark_drawn(parameter: Any) -> None:
    """Mark a parameter as initialised, so that transformers does not initialise it again."""
    parameter._is_hf_initialized = True


def _names(spec: ModelSpec) -> set[str]:
    return {item.name for item in graph.parameters(spec.graph)}


def _require_grads(module: nn.Module, inputs: Any, output: Any) -> None:
    (output[0] if isinstance(output, tuple) else output).requires_grad_(True)


class SeqblocksForCausalLM(SeqblocksPreTrainedModel, GenerationMixin):
    """A language model: token ids to logits of the next token. `generate` carries its state in the cache."""

    main_input_name = "input_ids"
    _is_stateful = False  # the cache supports `crop`, by reading accepted tokens again

    @classmethod
    def check_fit(cls, spec: ModelSpec, config: SeqblocksConfig) -> None:
        """Raise UsageError if a spec is not a causal language model."""
        super().check_fit(spec, config)
        if reason := hf_config.causal_lm_obstacle(spec):
            raise UsageError(f"{spec.name} is not a causal language model: {reason}")

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        token_type_ids: Tensor | None = None,
        cache: StateCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """Return logits, the loss if there are labels (not shifted; -100 is ignored), and the cache.

        attention_mask: padding must come before a sequence, whose state is reset there. position_ids: each 0 begins a
        packed sequence. past_key_values, or cache: that of an earlier call; it is not modified. use_cache: by default
        from the config, and off in training. kwargs: inputs that do not stream, by name. output_hidden_states=True adds
        the input of the first layer and the output of each layer. A model with experts adds their balance losses to the
        loss while it trains, or with output_router_logits=True, which also returns the routers' outputs.
        Raises RunError for unsupported arguments.
        """
        if isinstance(input_ids, Tensor) and input_ids.ndim and not input_ids.shape[-1]:
            raise RunError("input_ids is empty: pass at least one token, such as the tokenizer's bos_token_id")
        given = arguments.without_packing(kwargs, position_ids, token_type_ids)
        of_the_loss = {name: given.pop(name) for name in arguments.OF_THE_LOSS & given.keys()}
        cache = arguments.one_cache(past_key_values, cache)
        if use_cache is None:
            use_cache = cache is not None or self._may_cache(attention_mask, labels)
        logits_kept = logits_to_keep if labels is None else 0
        ran = self._run(input_ids, attention_mask, position_ids, cache, use_cache, logits_kept, given)
        loss = None
        if labels is not None:
            arguments.check_labels(labels, ran.y)
            loss = self.loss_function(logits=ran.y, labels=labels, vocab_size=ran.y.shape[-1], **of_the_loss)
            loss = routing.with_penalty(loss, ran.penalty, labels[:, 1:], **of_the_loss)
        arguments.check_logits_to_keep(logits_to_keep)
        kind = MoeCausalLMOutputWithPast if self.model.has_experts else CausalLMOutputWithPast
        named = {CACHE: ran.cache, "hidden_states": ran.hidden_states, **ran.routing}
        return kind(loss=loss, logits=arguments.last(ran.y, logits_to_keep), **named)

    def _may_cache(self, mask: Any, labels: Any) -> bool:
        """Return whether a cache is returned by default: not in training, nor after padding on the right."""
        if self.training or labels is not None or self.model.streaming_obstacle or not self.config.use_cache:
            return False
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return True
        return not torch.compiler.is_compiling() and bool(mask[:, -1].all())

    # --- what generate calls ---

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raise RunError: continuous batching needs a paged cache of keys and values."""
        what = "continuous batching needs a paged cache of keys and values, and this model's cache is its state"
        raise RunError(f"{what}: pass a left-padded batch to `generate` instead")

    generate_batch = continuous_batching_context_manager = init_continuous_batching

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # otherwise, `generate` would create keys and values for each layer

    def _prepare_attention_mask_for_generation(self, inputs: Tensor, generation_config: Any, *others: Any) -> Tensor:
        """Return a mask for inputs without one. That of drafts is all ones: `generate` dropped it for that reason."""
        if generation_config.is_assistant:
            return torch.ones(inputs.shape[:2], dtype=torch.long, device=inputs.device)
        mask: Tensor = super()._prepare_attention_mask_for_generation(inputs, generation_config, *others)
        return mask

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any
    ) -> None:
        """Create an empty cache, which records tokens if drafts may be rejected, or check the given one."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic", "dynamic_full"):  # transformers 5.0 sets dynamic_full for drafts
            what = f"cache_implementation={kind!r}"
            raise UsageError(f"{what} is a cache of keys and values, and this model's cache is its state: omit it")
        given = arguments.one_cache(model_kwargs.pop("past_key_values", None), model_kwargs.pop("cache", None))
        if given is None and generation_config.use_cache is not False and self.model.streaming_obstacle is None:
            given = StateCache()
        if given is not None:
            model_kwargs[CACHE] = given
        drafts = generation_config.is_assistant or generation_mode == GenerationMode.ASSISTED_GENERATION
        if isinstance(given, StateCache) and drafts:
            given.activate_past_recording()

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        super()._validate_model_kwargs({k: v for k, v in model_kwargs.items() if k not in self._inputs[1:]})

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of the next call, without the inputs that the state already contains."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        cache = inputs.get(CACHE)
        if cache is not None and cache.get_seq_length():
            inputs = {name: value for name, value in inputs.items() if name not in self._inputs[1:]}
        return inputs


class SeqblocksForImageClassification(SeqblocksPreTrainedModel):
    """A classifier of images."""

    main_input_name = "pixel_values"

    @classmethod
    def check_fit(cls, spec: ModelSpec, config: SeqblocksConfig) -> None:
        """Raise UsageError if a spec does not classify images, or the config has another number of classes."""
        if reason := hf_config.image_classification_obstacle(spec):
            raise UsageError(f"{spec.name} does not classify images: {reason}")
        classes = hf_config.sizes(spec)["num_labels"]
        if config.num_labels != classes:
            what = f"the config has {config.num_labels} labels, and {spec.name} has {classes} classes"
            how = f"set={{'classes': {config.num_labels}}}"
            raise UsageError(f"{what}: set the number in the spec, for example with {how}")

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutput:
        """Return logits [batch, classes], and the loss if labels [batch] are given. Raises RunError."""
        of_the_loss = {name: kwargs.pop(name) for name in arguments.OF_THE_LOSS & kwargs.keys()}
        ran = self._run(arguments.cast(pixel_values, self.dtype), None, None, None, None, 0, kwargs)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels, ran.y, self.config, **of_the_loss)
            loss = routing.with_penalty(loss, ran.penalty, labels, **of_the_loss)
        kind = routing.MoeImageClassifierOutput if self.model.has_experts else ImageClassifierOutput
        return kind(loss=loss, logits=ran.y, hidden_states=ran.hidden_states, **ran.routing)


class SeqblocksModel(SeqblocksPreTrainedModel):
    """A feature extractor: the input of the spec's head (the last `unembed` or `classifier`), or else the output."""

    main_input_name = "input_ids"

    def __init__(self, config: SeqblocksConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.main_input_name = MAIN_INPUTS.get(self.model.spec.input.kind, "inputs_embeds")

    @classmethod
    def part(cls, spec: ModelSpec) -> ModelSpec:
        """Return a spec without its head."""
        return hf_config.without_head(spec)

    def _output(self, y: Any) -> Any:
        return y

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: StateCache | None = None,
        use_cache: bool | None = None,
        pixel_values: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        cache: StateCache | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        """Return features: last_hidden_state [batch, seq, features], or pooler_output [batch, features].

        Named outputs of the spec keep their names.

        The input is input_ids, pixel_values or inputs_embeds (a sequence of features, or a vector), depending on the
        spec. Other arguments are those of the language model, but a cache is returned only with use_cache=True. Raises
        RunError for unsupported arguments.
        """
        own = {"input_ids": input_ids, "pixel_values": pixel_values, "inputs_embeds": inputs_embeds}
        x = arguments.cast(own.pop(self.main_input_name), self.dtype)
        given = arguments.without_packing(kwargs, position_ids, token_type_ids) | own
        cache = arguments.one_cache(past_key_values, cache)
        ran = self._run(x, attention_mask, position_ids, cache, use_cache, 0, given)
        y, hidden = ran.y, ran.hidden_states
        if isinstance(y, dict) or ran.routing:
            main = y if isinstance(y, dict) else {"pooler_output" if y.ndim == 2 else "last_hidden_state": y}
            more = {CACHE: ran.cache, "hidden_states": hidden, **ran.routing}
            return ModelOutput(**main, **{name: value for name, value in more.items() if value is not None})
        if y.ndim == 2:
            return BaseModelOutputWithPooling(pooler_output=y, hidden_states=hidden)
        return BaseModelOutputWithPast(last_hidden_state=y, hidden_states=hidden, **{CACHE: ran.cache})


CLASSES = {each.__name__: each for each in (SeqblocksForCausalLM, SeqblocksForImageClassification, SeqblocksModel)}


def wrap(model: SequenceModel, **config: Any) -> Any:
    """Wrap a built model as a model of transformers, with the class that fits it. Both share their parameters.

    config: entries of the config, such as eos_token_id. Raises UsageError if no class fits.
    """
    if not isinstance(model, SequenceModel):
        raise UsageError(f"wrap needs a model from seqblocks.build, not {type(model).__name__}")
    if model.tensor_shards:
        what = "the model holds one rank's part of the weights"
        raise UsageError(f"{what}: save it, then wrap the result of seqblocks.load")
    kind = CLASSES[hf_config.architecture(model.spec)]
    if kind is SeqblocksModel and hf_config.head(model.spec):
        language, images = hf_config.causal_lm_obstacle(model.spec), hf_config.image_classification_obstacle(model.spec)
        reasons = f"For language: {language}. For images: {images}."
        how = "AutoModel can load it from a saved folder, without its head"
        raise UsageError(f"no class of transformers fits {model.spec.name}. {reasons} {how}")
    return kind(SeqblocksConfig.of(model.spec, **config), model=model)
