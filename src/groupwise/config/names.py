"""Other libraries' names of settings, and their names here."""

OURS = {
    "module": "model",
    **dict.fromkeys(("data_loader", "dataloader", "train_loader", "dataset"), "data"),
    **dict.fromkeys(("criterion", "loss_fn", "loss"), "losses"),
    "target_epsilon": "epsilon",
    "eps": "epsilon",
    "target_delta": "delta",
    **dict.fromkeys(("sigma", "noise_scale", "noise_std"), "noise_multiplier"),
    **dict.fromkeys(("max_grad_norm", "l2_norm_clip", "clipping_norm", "max_norm", "clip_norm"), "threshold"),
    **dict.fromkeys(("clipping", "clipping_mode", "grad_sample_mode"), "clip"),
    **dict.fromkeys(("expected_batch_size", "logical_batch_size", "bs"), "batch_size"),
    **dict.fromkeys(("num_epochs", "num_train_epochs", "n_epochs"), "epochs"),
    **dict.fromkeys(("num_steps", "max_steps", "n_steps", "total_steps"), "steps"),
    **dict.fromkeys(("physical_batch_size", "max_physical_batch_size", "micro_batch_size"), "microbatch"),
    "lr": "learning_rate",
    "wd": "weight_decay",
}
"""A setting's name in Opacus, JAX Privacy, TensorFlow Privacy or transformers -> its name here."""
