"""MNIST with DP-SGD at ε = 3, δ = 1e-5: an MLP of 128 and 256 tanh units.

The hyper-parameters were chosen on a validation split, the last sixth of the training images
(validation_fraction=0.16667; batch size and steps with a tenth), with tanh in place of the paper's
sigmoid and the moving average of the weights among them. No ε covers that choice. A minute or two
on 2 cores.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The defaults of the image pipeline."""
    config = ml_collections.ConfigDict()
    config.seed = 0  # of the initial weights
    config.data = ml_collections.ConfigDict(
        {
            "path": "",  # an .npz of x_train, y_train, x_test and y_test
            "tfds": "",  # or the name of a data set in tensorflow-datasets
            "directory": "",  # of tensorflow-datasets; by default its own
            "num_classes": 10,
            # Above 0, the last training images are held out and evaluated in place of the test's.
            "validation_fraction": 0.0,
        }
    )
    config.model = ml_collections.ConfigDict(
        {"name": "mlp", "options": {"hidden": (128, 256), "activation": "tanh"}}
    )
    config.training = ml_collections.ConfigDict({"batch_size": 8192, "steps": 1000})
    config.optimizer = ml_collections.ConfigDict(
        {
            "name": "SGD",
            # Decays to 0 along a cosine. Gradients are at most clip_norm long: 20 at clip_norm=0.1
            # moves weights as far as 2 at clip_norm=1.
            "learning_rate": 20.0,
            # Weight decay forgets the noise in weights that few images use.
            "options": {
                "momentum": 0.9,
                "weight_decay": 2e-4,
                "use_ema": True,
                "ema_momentum": 0.98,
            },
        }
    )
    config.privacy = ml_collections.ConfigDict({"epsilon": 3.0, "delta": 1e-5, "clip_norm": 0.1})
    config.report = ml_collections.ConfigDict(
        {"directory": "runs/images", "diagnostics": "private", "verbose": 1}
    )
    return config
