"""Pre-train a NEST model: `python train.py [--config-name NAME] [KEY=VALUE]…`, as `nest-ssl pretrain`."""

from nest_ssl import EncDecDenoiseMaskedTokenPredModel
from nest_ssl.config import NestConfig
from nest_ssl.training import Trainer, exp_manager, hydra_runner, maybe_init_from_pretrained_checkpoint


@hydra_runner(config_path="src/nest_ssl/config/yaml", config_name="nest_fast-conformer")
def main(cfg: NestConfig) -> None:
    trainer = Trainer(**cfg.trainer)
    exp_manager(trainer, cfg.exp_manager)
    model = EncDecDenoiseMaskedTokenPredModel(cfg.model, trainer)
    maybe_init_from_pretrained_checkpoint(model, cfg)
    trainer.fit(model)


if __name__ == "__main__":
    main()
