"""SST-2's phrases as a bag of words: a classifier that is its word table and 33 numbers more.

The base of the study in `pipelines.glue.bag_study`, at ε = 3 by DP-AdaFEST with windows; 20 to
30 s on 2 cores.
"""

import ml_collections

from configs import common, glue_sst2


def get_config() -> ml_collections.ConfigDict:
    """One run of `pipelines.glue.bag`."""
    config = ml_collections.ConfigDict()
    config.task = "sst2"
    config.method = "dp_adafest"  # any of pipelines.glue.settings.METHODS
    config.seed = 0
    config.model = ml_collections.ConfigDict(
        {
            "tokenizer": "",  # a folder with RoBERTa's BPE
            "width": 32,
            "words": "trained",  # or frozen, or lora
            "word_rank": 0,  # of LoRA on the word table
        }
    )
    config.data = glue_sst2.get_config().data
    config.data.update({"held_out": 7_000, "validation": 3_000, "judge": "validation"})
    config.training = ml_collections.ConfigDict(
        {"batch_size": 1024, "epochs": 5.0, "evaluations": 1}
    )
    config.optimizer = ml_collections.ConfigDict(
        {"name": "Adam", "options": {"learning_rate": 0.03}, "decays": False}
    )
    config.privacy = ml_collections.ConfigDict({"epsilon": 3.0, "delta": 0.0, "clip_norm": 1.0})
    config.adafest = common.adafest_of_a_bag()
    config.selection = ml_collections.ConfigDict(
        {"source": "gaussian", "rows": 1000, "share": 0.02, "counts": ""}
    )
    config.report = ml_collections.ConfigDict(
        {"directory": "runs/glue_bag", "diagnostics": "private", "verbose": 0}
    )
    return config
