"""Keys in NeMo's files that NEST does not use: accepted, dropped, and logged in one line."""

from __future__ import annotations

from nest_ssl.config.data import UNUSED_DATASET_KEYS

UNUSED_MODEL_KEYS: dict[str, str] = {
    "spec_augment": "NEST masks with `masking`; NeMo keeps this section only because its base class requires it",
    "skip_nan_grad": "non-finite steps are always skipped, by all ranks together",
    "variational_noise": "not part of NEST",
    "loss_list": "only for NeMo's contrastive models",
    "labels": "there are no transcripts in pre-training",
    "tokenizer": "there are no transcripts in pre-training",
    "optim.sched.monitor": "these schedules monitor no metric",
    "optim.sched.reduce_on_plateau": "these schedules monitor no metric",
    "optim.sched.iters_per_batch": "the trainer knows the number of steps",
    "preprocessor.rng": "NeMo's narrow-band augmentation",
    "preprocessor.nb_max_freq": "NeMo's narrow-band augmentation",
    "preprocessor.use_torchaudio": "deprecated in NeMo; the result does not depend on it",
    "preprocessor.stft_exact_pad": "deprecated in NeMo; no effect there either",
    "preprocessor.stft_conv": "deprecated in NeMo; no effect there either",
}

UNUSED_ROOT_KEYS: dict[str, str] = {
    "exp_manager.resume_past_end": "a finished run resumes once max_steps or max_epochs is raised",
    "exp_manager.disable_validation_on_resume": "a resumed run validates where an uninterrupted run would have",
    "exp_manager.seconds_to_sleep": "ranks do not need to wait for the folder",
    "exp_manager.log_delta_step_timing": "step times are logged by `log_step_timing`",
    "exp_manager.step_timing_kwargs": "step times are logged by `log_step_timing`",
    "exp_manager.log_tflops_per_sec_per_gpu": "speed is logged in audio-seconds per second",
    **{
        f"exp_manager.create_{name}": "this NeMo service is not part of nest-ssl"
        for name in (
            "mlflow_logger",
            "dllogger_logger",
            "clearml_logger",
            "neptune_logger",
            "ipl_epoch_stopper_callback",
            "straggler_detection_callback",
            "fault_tolerance_callback",
        )
    },
    **{
        f"exp_manager.{name}": "this NeMo service is not part of nest-ssl"
        for name in (
            "mlflow_logger_kwargs",
            "dllogger_logger_kwargs",
            "clearml_logger_kwargs",
            "neptune_logger_kwargs",
            "ipl_epoch_stopper_callback_params",
            "straggler_detection_params",
            "fault_tolerance",
        )
    },
    "exp_manager.checkpoint_callback_params.filepath": "the folder is `dirpath`",
    "exp_manager.checkpoint_callback_params.model_parallel_size": "nest-ssl has no model parallelism",
    "exp_manager.checkpoint_callback_params.async_save": "checkpoints are written synchronously and atomically",
    "exp_manager.checkpoint_callback_params.save_last_n_optim_states": "every checkpoint holds the optimizer",
    "exp_manager.checkpoint_callback_params.auto_insert_metric_name": "names are always written out",
}


def unused_keys(model_prefix: str = "model") -> dict[str, str]:
    """Return all unused keys as dotted paths, for a model section at `model_prefix`."""
    keys = {f"{model_prefix}.{key}": reason for key, reason in UNUSED_MODEL_KEYS.items()}
    for section in ("train_ds", "validation_ds", "test_ds"):
        keys.update({f"{model_prefix}.{section}.{key}": reason for key, reason in UNUSED_DATASET_KEYS.items()})
    return keys | UNUSED_ROOT_KEYS
