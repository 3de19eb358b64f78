"""Flags of sd-scripts (v0.10.1 and v0.11.1) that this trainer does not support, with the reason.

These flags are refused by name, because a flag that is silently ignored would train something else. Each reason covers
several flags and completes the sentence "--FLAG is not supported by the built-in trainer: …".
"""

REASONS: dict[str, str] = {
    "the data set is described by --dataset_config only": (
        "train_data_dir reg_data_dir in_json dataset_class dataset_repeats conditioning_data_dir cache_info"
    ),
    "captions and images are cached once, so they cannot change from step to step; use the sd-scripts backend for this": (
        "keep_tokens_separator secondary_separator enable_wildcard color_aug flip_aug "
        "face_crop_aug_range random_crop token_warmup_min token_warmup_step "
        "caption_dropout_every_n_epochs caption_tag_dropout_rate weighted_captions"
    ),
    "each image and caption is encoded alone, so that its cache file depends on nothing else; remove the flag": (
        "vae_batch_size text_encoder_batch_size skip_cache_check"
    ),
    "the model is read from a folder in diffusers' layout, which has all parts; use the sd-scripts backend for single "
    "files": "clip_l t5xxl ae vae tokenizer_cache_dir disable_mmap_load_safetensors",
    "moving blocks during a step is a known cause of hangs; use --blocks_to_stream, which only copies them": (
        "blocks_to_swap cpu_offload_checkpointing"
    ),
    "scaled-dot-product attention is always used; use --sdpa": "xformers mem_eff_attn",
    "the model is not compiled; remove the flag": "torch_compile dynamo_backend",
    "the gradients of the LoRA are averaged in one call per step, without a wrapper; remove the flag": (
        "ddp_gradient_as_bucket_view ddp_static_graph fused_backward_pass deepspeed zero_stage "
        "offload_optimizer_device offload_optimizer_nvme_path offload_param_device offload_param_nvme_path "
        "zero3_init_flag zero3_save_16bit_model fp16_master_weights_and_gradients"
    ),
    "LoRA weights are trained in float32; use --mixed_precision to set the precision of the computation": (
        "full_fp16 full_bf16"
    ),
    "only the transformer is trained; use the sd-scripts backend to train text encoders": "text_encoder_lr network_train_text_encoder_only",
    "training resumes at exactly the step of its state; use --resume DIR only": (
        "initial_epoch initial_step skip_until_initial_step"
    ),
    "it has no uploads; upload the LoRA after training, or use the sd-scripts backend": (
        "huggingface_repo_id huggingface_repo_type huggingface_path_in_repo huggingface_token "
        "huggingface_repo_visibility save_state_to_huggingface resume_from_huggingface async_upload"
    ),
    "settings come from the command line only, which train.sh records; write them there": "config_file output_config log_config",
    "output goes to the terminal only; redirect it to a file": "console_log_file console_log_level",
    "train.sh would store the key; set the variable WANDB_API_KEY instead": "wandb_api_key",
    "the names of trackers are set by --log_tracker_name and --wandb_run_name; use these": "log_prefix log_tracker_config",
    "use the sd-scripts backend for this": (
        "alpha_mask masked_loss prior_loss_weight ip_noise_gamma ip_noise_gamma_random_strength scale_weight_norms "
        "base_weights base_weights_multiplier dim_from_weights lowram debug_dataset "
        "resize_interpolation caption_extention save_n_epoch_ratio use_8bit_adam use_lion_optimizer "
        "lr_scheduler_type lr_scheduler_args lr_decay_steps lr_scheduler_timescale lr_scheduler_min_lr_ratio "
        "metadata_thumbnail metadata_merged_from metadata_preprocessor metadata_is_negative_embedding model_type "
        "skip_image_resolution train_inpainting show_timesteps show_timesteps_resolution v2 clip_skip max_token_length "
        "scale_v_pred_loss_like_noise_pred v_pred_like_loss debiased_estimation_loss noise_offset "
        "noise_offset_random_strength multires_noise_iterations multires_noise_discount adaptive_noise_scale "
        "min_timestep max_timestep sample_sampler controlnet_model_name_or_path"
    ),
}


def reasons() -> dict[str, str]:
    """The reason for each unsupported flag, by `--flag`."""
    return {f"--{flag}": reason for reason, flags in REASONS.items() for flag in flags.split()}
