"""RoBERTa base with LoRA on QNLI, whether a sentence answers a question, by DP-AdaFEST at ε = 3.

Its file is not at hand here: the task is tested on made-up lines, and has not been run.
"""

import ml_collections

from configs import glue_sst2


def get_config() -> ml_collections.ConfigDict:
    """The same job on pairs."""
    config = glue_sst2.get_config()
    config.task = "qnli"
    config.data.length = 128
    config.report.directory = "runs/glue_qnli"
    return config
