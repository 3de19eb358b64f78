"""Counts with sd-scripts' own code: run in its environment, `count_sd_scripts.py CHECKOUT < cases > counts`, JSON both.

A case: {"config": path of dataset.toml, "split": share held out, "flags": […]}. Its answer: [batches, images held out].
The data sets are made and counted as train_network.py does it (lines about `generate_dataset_group_by_blueprint`).
"""

import json
import sys

sys.path.insert(0, sys.argv[1])
import train_network
from library import config_util

from sd_scripts_patches import validation

for module in list(sys.modules.values()):  # our patch, which the launcher applies
    if getattr(module, "split_train_val", None) is not None and module.__name__.startswith("library."):
        module.split_train_val = validation._apart(module.split_train_val)
answers = []
for case in json.load(sys.stdin):
    given = ["--dataset_config", case["config"], "--seed", "7", *case["flags"]]
    args = train_network.setup_parser().parse_args(given)
    generator = config_util.BlueprintGenerator(config_util.ConfigSanitizer(True, True, args.masked_loss, True))
    blueprint = generator.generate(config_util.load_user_config(args.dataset_config), args)
    train, held = config_util.generate_dataset_group_by_blueprint(blueprint.dataset_group)
    answers.append([len(train), held.num_train_images if held is not None else 0])
print("\n" + json.dumps(answers))
