"""Flags of sd-scripts (v0.10.1) that this trainer does not have, each with the reason why.

A flag that is ignored in silence trains something else than what was asked for, so these are refused by name. The
table is data: one reason, the flags it covers.
"""

REASONS: dict[str, str] = {
    "this trainer reads a data set only through --dataset_config": (
        "train_data_dir reg_data_dir in_json dataset_class dataset_repeats conditioning_data_dir cache_info"
    ),
    "captions and images are cached once, so nothing about them may change from step to step": (
        "shuffle_caption keep_tokens_separator secondary_separator enable_wildcard color_aug flip_aug "
        "face_crop_aug_range random_crop token_warmup_min token_warmup_step caption_dropout_rate "
        "caption_dropout_every_n_epochs caption_tag_dropout_rate weighted_captions"
    ),
    "each image and caption is encoded alone, so that its cache depends on nothing but itself": (
        "vae_batch_size text_encoder_batch_size skip_cache_check"
    ),
    "it does not apply to FLUX.1": (
        "v2 v_parameterization clip_skip max_token_length zero_terminal_snr min_snr_gamma "
        "scale_v_pred_loss_like_noise_pred v_pred_like_loss debiased_estimation_loss noise_offset "
        "noise_offset_random_strength multires_noise_iterations multires_noise_discount adaptive_noise_scale "
        "min_timestep max_timestep sample_sampler controlnet_model_name_or_path"
    ),
    "this trainer reads a folder in diffusers' layout, which holds all parts of the model; single files go with the "
    "sd-scripts backend": "clip_l t5xxl ae vae tokenizer_cache_dir disable_mmap_load_safetensors",
    "moving blocks in the middle of a step is a known cause of hangs; --split_mode moves two halves instead": (
        "blocks_to_swap cpu_offload_checkpointing"
    ),
    "scaled-dot-product attention (--sdpa) is the only attention here": "xformers mem_eff_attn",
    "the model runs uncompiled": "torch_compile dynamo_backend",
    "gradients of the LoRA are averaged in one call a step; no wrapper holds them": (
        "ddp_gradient_as_bucket_view ddp_static_graph fused_backward_pass deepspeed zero_stage "
        "offload_optimizer_device offload_optimizer_nvme_path offload_param_device offload_param_nvme_path "
        "zero3_init_flag zero3_save_16bit_model fp16_master_weights_and_gradients"
    ),
    "LoRA weights are trained in float32; --mixed_precision sets the precision of the computation": (
        "full_fp16 full_bf16"
    ),
    "only the transformer is trained": "text_encoder_lr network_train_text_encoder_only",
    "a resume goes on at exactly the step of its state (--resume DIR)": (
        "initial_epoch initial_step skip_until_initial_step"
    ),
    "this trainer uploads nothing": (
        "huggingface_repo_id huggingface_repo_type huggingface_path_in_repo huggingface_token "
        "huggingface_repo_visibility save_state_to_huggingface resume_from_huggingface async_upload"
    ),
    "there is no validation set in this trainer; choose the sd-scripts backend for one": (
        "validation_seed validation_split validate_every_n_steps validate_every_n_epochs max_validation_steps"
    ),
    "settings come from the command line, which train.sh keeps": "config_file output_config log_config",
    "output goes to the terminal; the launcher keeps it": "console_log_file console_log_level",
    "a key on a command line is kept in train.sh for ever; set WANDB_API_KEY instead": "wandb_api_key",
    "trackers take their name from --log_tracker_name and --wandb_run_name": "log_prefix log_tracker_config",
    "it is not built here; choose the sd-scripts backend for it": (
        "alpha_mask masked_loss prior_loss_weight ip_noise_gamma ip_noise_gamma_random_strength scale_weight_norms "
        "base_weights base_weights_multiplier network_weights dim_from_weights lowram debug_dataset "
        "resize_interpolation caption_separator caption_extention save_n_epoch_ratio use_8bit_adam use_lion_optimizer "
        "lr_scheduler_type lr_scheduler_args lr_decay_steps lr_scheduler_timescale lr_scheduler_min_lr_ratio "
        "metadata_thumbnail metadata_merged_from metadata_preprocessor metadata_is_negative_embedding model_type"
    ),
}


def reasons() -> dict[str, str]:
    """`{"--flag": why it is refused}` for every flag in the table."""
    return {f"--{flag}": reason for reason, flags in REASONS.items() for flag in flags.split()}
