"""Entries of a config.json that may stay unread, because they do not change what a model computes."""

from __future__ import annotations

from seqblocks.checkpoint.families.values import Config, Recorded
from seqblocks.errors import UsageError, listing

# What transformers and its older versions write for every model; training, kernels, generation; entries without use.
HARMLESS = """
_attn_implementation _attn_implementation_autoset _commit_hash _from_model_config _name_or_path architectures
attn_implementation auto_map dtype experts_implementation is_decoder is_encoder_decoder model_type name_or_path
tokenizer_class torch_dtype torchscript transformers_version

add_cross_attention chunk_size_feed_forward cross_attention_hidden_size finetuning_task id2label label2id
output_attentions output_hidden_states prefix problem_type pruned_heads return_dict task_specific_params
tie_encoder_decoder use_bfloat16 use_return_dict

bos_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id unk_token_id

bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p use_cache

attention_dropout fuse_cross_entropy fuse_linear_cross_entropy output_router_logits router_aux_loss_coef use_l2warp
z_loss_coefficient

attn_mode chunk_size fuse_norm fuse_swiglu fused_add_norm residual_in_fp32 use_associative_scan use_mamba_kernels
use_mambapy use_mem_eff_path

cache_implementation calc_logits_for_entire_prompt max_position_embeddings model_max_length num_logits_to_keep
num_nextn_predict_layers partial_rotary_factor pretraining_tp rope_theta time_step_rank
"""

# By model_type: those that only some of its layers use, follow from others, or are left over from older versions.
IDLE = {
    "mamba": "d_inner d_model n_layer pad_vocab_size_multiple rms_norm ssm_cfg",
    "mamba_ssm": "attn_cfg ssm_cfg.chunk_size ssm_cfg.use_fast_path ssm_cfg.use_mem_eff_path",
    "mamba2": "d_inner d_model n_layer norm_before_gate pad_vocab_size_multiple rms_norm ssm_cfg",
    "falcon_mamba": "use_falcon_mambapy",
    "xlstm": """
        autocast_kernel_dtype chunkwise_kernel embedding_dim force_bos_token_insert head_dim igate_bias_init_range
        inference_state_dtype max_inference_chunksize mlstm_round_up_to_multiple_of mode norm_reduction_force_float32
        num_hidden_layers return_last_states sequence_kernel step_kernel
    """,
    "qwen2": "sliding_window",
    "qwen3": "sliding_window",
    "qwen3_moe": "intermediate_size max_window_layers sliding_window",
    "smollm3": "max_window_layers",
    "gemma2": "hidden_act",
    "deepseek_v2": """
        aux_loss_alpha ep_size head_dim moe_layer_freq n_group num_key_value_heads qk_head_dim scoring_func seq_aux
        topk_group
    """,
    "deepseek_v3": """
        aux_loss_alpha ep_size head_dim moe_layer_freq num_key_value_heads num_mtp_layers qk_head_dim scoring_func
        seq_aux topk_method
    """,
    "lfm2": """
        block_dim block_ff_dim block_ffn_dim_multiplier block_mlp_init_scale block_multiple_of block_norm_eps
        block_out_init_scale block_use_swiglu block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init
        full_attn_idxs intermediate_size num_heads theta tie_embedding use_pos_enc
    """,
    "lfm2_moe": "block_multiple_of head_dim num_experts num_experts_per_tok use_pos_enc",
    "gpt_neox": "classifier_dropout rotary_emb_base rotary_pct",
    "gpt_oss": "head_dim initial_context_length sliding_window",
    "minimax": """
        block_size full_attn_alpha_factor full_attn_beta_factor linear_attn_alpha_factor linear_attn_beta_factor
        rope_parameters rope_scaling sliding_window
    """,
    "phi3": "original_max_position_embeddings",
    "gemma3": """
        boi_token_index eoi_token_index image_token_index initializer_range mm_tokens_per_image vision_config
    """,
    "gemma3_text": "_sliding_window_pattern",
    "recurrent_gemma": "_block_types final_w_init_variance_scale initializer_range",
    "qwen3_next": """
        full_attention_interval head_dim intermediate_size linear_conv_kernel_dim linear_key_head_dim
        linear_num_key_heads linear_num_value_heads linear_value_head_dim moe_intermediate_size norm_topk_prob
        num_attention_heads num_experts num_experts_per_tok num_key_value_heads rope_parameters rope_scaling
        shared_expert_intermediate_size
    """,
    "qwen3_5": "image_token_id video_token_id vision_config vision_end_token_id vision_start_token_id",
    "qwen3_5_text": """
        full_attention_interval head_dim linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
        linear_num_value_heads linear_value_head_dim mamba_ssm_dtype mlp_only_layers mtp_num_hidden_layers
        mtp_use_dedicated_embeddings num_attention_heads num_key_value_heads rope_parameters
        rope_parameters.mrope_interleaved rope_parameters.mrope_section rope_scaling
    """,
    "olmo_hybrid": "rope_parameters.rope_type rope_parameters.type rope_scaling",
    "kimi_linear": """
        attention_bias first_k_dense_replace head_dim intermediate_size kv_lora_rank linear_attn_config.full_attn_layers
        linear_attn_config.kda_layers linear_conv_kernel_dim linear_head_dim linear_num_heads moe_intermediate_size
        moe_renormalize num_attention_heads num_experts num_experts_per_token num_key_value_heads num_shared_experts
        q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim rope_parameters rope_scaling routed_scaling_factor
        use_grouped_topk v_head_dim
    """,
    "jamba": "expert_layer_offset expert_layer_period",
    "bamba": "mamba_chunk_size",
    "falcon_h1": """
        mamba_chunk_size mamba_expand mamba_norm_before_gate mlp_expansion_factor time_step_floor time_step_max
        time_step_min
    """,
    "granitemoehybrid": """
        attention_bias attention_multiplier init_method intermediate_size mamba_chunk_size mamba_conv_bias mamba_d_conv
        mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads num_attention_heads num_experts_per_tok
        num_key_value_heads rope_parameters rope_scaling time_step_limit
    """,
    "nemotron_h": """
        attention_head_dim conv_kernel expand head_dim hybrid_override_pattern intermediate_size mamba_head_dim
        mamba_num_heads mamba_ssm_cache_dtype moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size
        moe_shared_expert_overlap mtp_hybrid_override_pattern mtp_layers_block_type n_group n_groups n_routed_experts
        n_shared_experts norm_topk_prob num_attention_heads num_experts_per_tok num_hidden_layers num_key_value_heads
        rescale_prenorm_residual routed_scaling_factor ssm_state_size time_step_floor time_step_limit time_step_max
        time_step_min topk_group use_conv_bias
    """,
    "zamba2": """
        ffn_hidden_size kv_channels lora_rank num_query_groups rope_parameters rope_scaling time_step_limit
        use_conv_bias
    """,
    "gla": "conv_size share_conv_kernel",
    "retnet": "conv_size share_conv_kernel",
    "hgrn2": "conv_size num_heads share_conv_kernel",
    "kda": "safe_gate",
    "rwkv": "context_length",
    "rwkv7": "num_heads",
}


def check_not_quantized(config: Config) -> None:
    """Raise UsageError for quantized weights."""
    found = config.get("quantization_config")
    if found:
        method = found.get("quant_method") if isinstance(found, dict) else None
        how = f" ({method})" if isinstance(method, str) else ""
        what = f"config.json has a quantization_config{how}, and seqblocks does not read quantized weights"
        raise UsageError(f"{what}. Dequantize them with transformers, save the model, and load that folder")


def check_all_read(config: Recorded, kind: str) -> None:
    """Raise UsageError for entries that were not read and may change the model; null and false switch nothing on."""
    idle = {*HARMLESS.split(), *IDLE.get(kind, "").split()}
    names = [name for name, value in config.unread() if value is not None and value is not False and name not in idle]
    if names:
        what, which = ("entries", "those that do") if len(names) > 1 else ("an entry", "it if it does")
        where = f"config.json has {what} that seqblocks does not read in models of type {kind}: {listing(names, 8)}"
        raise UsageError(f"{where}. Remove {which} not change the results, or pass a spec for this model")
