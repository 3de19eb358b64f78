"""The tab New LoRA without its images: the form, the notes beside it, the model's files, and Start."""
