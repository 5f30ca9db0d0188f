"""Pre-train from Python, without the command line: python examples/train_from_python.py train.jsonl"""

import sys

from nest_ssl import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.config import compose
from nest_ssl.training import Trainer, exp_manager

cfg = compose("nest_demo", [f"model.train_ds.manifest_filepath={sys.argv[1]}", "~model.validation_ds", *sys.argv[2:]])
trainer = Trainer(**cfg.trainer)
folder = exp_manager(trainer, cfg.exp_manager)
model = EncDecDenoiseMaskedTokenPredModel(cfg.model, trainer)
trainer.fit(model)
print(f"{trainer.global_step} steps; the model is in {folder}/checkpoints")
