"""xLSTM language models from the config.json of transformers."""

from __future__ import annotations

from seqblocks.checkpoint.families.values import Config, above_0, flag, number, require, scalar, whole, written


def xlstm(config: Config) -> str:
    """Write an xLSTM-large language model, whose projections may be fused."""
    arguments = {
        "heads": whole(config, "num_heads"),
        "qk_factor": number(config, "qk_dim_factor", 0.5),
        "v_factor": number(config, "v_dim_factor", 1.0),
        "expand": number(config, "ffn_proj_factor", 2.667),
        "multiple": whole(config, "ffn_round_up_to_multiple_of", 64),
        "gate_cap": number(config, "gate_soft_cap", 15.0),
        "bias": flag(config, "use_bias", False),
        "eps": above_0(config, "norm_eps", 1e-6),
        "cell_eps": number(config, "eps", 1e-6),
        "zero_gate": True,
    }
    require(config, add_out_norm=(True, None), weight_mode=("single", "fused", None))
    dim = whole(config, "hidden_size" if config.get("hidden_size") else "embedding_dim")
    depth = whole(config, "num_blocks" if config.get("num_blocks") is not None else "num_hidden_layers")
    return f"""seqblocks: 1
about: xLSTM-large language model, as its config.json says
use: [xlstm]

let: {{dim: {dim}, depth: {depth}, vocabulary: {whole(config, "vocab_size")}}}

model:
  input: {{tokens: vocabulary}}
  steps:
    - embed: {{features: dim}}
    - repeat:
        name: blocks
        times: depth
        steps:
          - xlstm_large_block: {{dim: dim, blocks: layers, {written(arguments)}}}
    - rms_norm: {{name: norm, eps: {scalar(arguments["eps"])}}}
    - unembed: {{bias: false{", tie: embed" if flag(config, "tie_word_embeddings", False) else ""}}}
    - soft_cap: {{cap: {scalar(number(config, "output_logit_soft_cap", 30.0))}}}

checkpoint:
  embed: embedding
  blocks.{{layer}}.xlstm_large_block: backbone.blocks.{{layer}}
  norm: backbone.out_norm
  unembed: lm_head
  layouts: {{hub: {{embed: backbone.embeddings}}, fused: {{embed: backbone.embeddings}}}}
"""
