"""What becomes of settings of other trainers: fields of the form, what Hangproof sets itself, and what it cannot take over."""

WORDS = {  # fields of the form, by the name that the form shows
    "rank": "Rank",
    "alpha": "Alpha",
    "batch_size": "Batch size",
    "repeats": "Repeats",
    "epochs": "Epochs",
    "gradient_accumulation": "Gradient accumulation",
    "workers": "Data loader workers",
    "trackers": "Also log to",
    "learning_rate": "Learning rate",
    "max_train_steps": "Maximum steps",
    "seed": "Seed",
    "mixed_precision": "Precision",
    "save_every_n_steps": "Save a checkpoint every N steps",
    "save_every_n_epochs": "Save a LoRA every N epochs",
    "sample_every_n_steps": "Generate samples every N steps",
    "resolution": "Resolution",
    "keep_tokens": "keep_tokens",
    "name": "Name",
    "trigger": "Trigger word",
    "control_dir": "Folder of control images",
    "gpus": "GPUs per machine",
    "prompts": "Sample prompts",
}
# Values of the trainers where a configuration names none (sd-scripts library/train_util.py, train_network.py).
TRAINER_DEFAULTS = {"rank": 4, "alpha": 1.0}
STEPS = 1600
ENCODED_CAPTIONS = "Captions are encoded once, so they cannot change during training"
ENCODED_IMAGES = "Images are encoded once, so they cannot change during training"
BUCKETS = "Hangproof computes the buckets from the resolution"
NOT_HERE = {
    "shuffle_caption": ENCODED_CAPTIONS,
    "caption_dropout_rate": ENCODED_CAPTIONS,
    "caption_dropout_every_n_epochs": ENCODED_CAPTIONS,
    "caption_tag_dropout_rate": ENCODED_CAPTIONS,
    "token_warmup_step": ENCODED_CAPTIONS,
    "token_warmup_min": ENCODED_CAPTIONS,
    "weighted_captions": ENCODED_CAPTIONS,
    "color_aug": ENCODED_IMAGES,
    "random_crop": ENCODED_IMAGES,
    "face_crop_aug_range": ENCODED_IMAGES,
    "stop_text_encoder_training": "Text encoders are not trained",
    "text_encoder_lr": "Text encoders are not trained: captions are encoded once, which saves their memory",
    "reg_data_dir": "Regularization images are not supported",
    "prior_loss_weight": "Regularization images are not supported",
    "lowvram": "No trainer has it any more",
}
SECRET = "A secret: kept apart, in a file that only you can read; the run has its name"
BY_HANGPROOF = {
    "min_bucket_reso": BUCKETS,
    "max_bucket_reso": BUCKETS,
    "bucket_reso_steps": BUCKETS,
    "bucket_no_upscale": BUCKETS,
    "enable_bucket": BUCKETS,
    "save_last_n_steps": "Set by “Checkpoints to keep”",
    "save_last_n_steps_state": "Set by “Checkpoints to keep”",
    "save_last_n_epochs": "Set by “Checkpoints to keep”",
    "save_last_n_epochs_state": "Set by “Checkpoints to keep”",
    "save_precision": "Set by the precision",
    "save_state": "Hangproof always saves checkpoints",
    "save_state_on_train_end": "Hangproof always saves checkpoints",
    "console_log_simple": "Hangproof sets it",
    "sample_at_first": "",
    "max_validation_steps": "",
}
