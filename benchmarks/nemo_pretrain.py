"""NeMo's side of whole_program.py: pre-train the way NeMo's own script does. Run it with NeMo's Python.

python nemo_pretrain.py YAML OVERRIDE...
"""

import sys

import lightning.pytorch as pl
from nemo.collections.asr.models.ssl_models import EncDecDenoiseMaskedTokenPredModel
from nemo.utils.exp_manager import exp_manager
from omegaconf import OmegaConf

cfg = OmegaConf.load(sys.argv[1])
for override in sys.argv[2:]:
    key, _, value = override.partition("=")
    OmegaConf.update(cfg, key, OmegaConf.create(f"v: {value}").v, force_add=True)
OmegaConf.resolve(cfg.model)
trainer = pl.Trainer(**cfg.trainer)
exp_manager(trainer, cfg.exp_manager)
model = EncDecDenoiseMaskedTokenPredModel(cfg=cfg.model, trainer=trainer)
print("STARTS", flush=True)
trainer.fit(model)
print("ENDS, val_loss", float(trainer.callback_metrics["val_loss"]), flush=True)
