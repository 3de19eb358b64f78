"""The patches of kohya's musubi-tuner: what differs from sd-scripts. The machinery is in the package around it."""

BASE = "musubi_tuner.training.trainer_base"
ACCELERATOR_SETUP = "musubi_tuner.training.accelerator_setup"
TRAIN_UTILS = "musubi_tuner.utils.train_utils"
DATASET = "musubi_tuner.dataset.image_video_dataset"
LATENTS = {
    "musubi_tuner.cache_latents": "encode_datasets",
    "musubi_tuner.fpack_cache_latents": "encode_datasets_framepack",
}
"""Where latents are cached: module → function."""
CACHE_TEXT = "musubi_tuner.cache_text_encoder_outputs"
LOOP = "NetworkTrainer._run_training_loop"
