"""RoBERTa base with LoRA on SST-2 by DP-AdaFEST at ε = 3: Ghazi et al. (NeurIPS 2023), 4.1 and 4.4.

Weights come from keras-hub's preset, or from a folder of Hugging Face's Transformers, offline:
`--config.model.source=FOLDER`. All of the training file trains; the dev file judges.
"""

import ml_collections

from configs import common


def get_config() -> ml_collections.ConfigDict:
    """The defaults of the language pipeline; `pipelines.glue.settings` has all methods."""
    config = ml_collections.ConfigDict()
    config.task = "sst2"  # or qnli, qqp, xnli
    config.method = "dp_adafest"
    config.seed = 0  # of the initial weights
    config.model = ml_collections.ConfigDict(
        {
            "source": "roberta_base_en",  # a preset, hf://OWNER/NAME, a folder, or minilm
            "tokenizer": "",  # a folder; by default that of the source
            "words": "trained",  # or frozen (Table 6), or lora (Table 1)
            "word_rank": 0,  # of LoRA on the word table
            "rank": 16,  # of LoRA on query and value
            "pooling": "first",  # or mean
            "dropout": 0.0,  # noise is regularisation enough
        }
    )
    config.data = ml_collections.ConfigDict(
        {
            "path": "",  # a folder with train.tsv and dev.tsv, or .gz
            "tfds": False,  # or what tensorflow-datasets has prepared
            "directory": "",  # of tensorflow-datasets; by default its own
            "quarantine": False,  # whether malformed lines are left out and counted
            "length": 64,  # tokens; longer examples are cut
            "prepared": "",  # for tokens, private as the text is; by default DIRECTORY-tokens
            # Rows of the training file that do not train, apart by sentence:
            "held_out": 0,  # to judge by
            "validation": 0,  # to choose settings by; either reads all rows, at no ε
            "split_seed": 0,
            "judge": "dev",  # or held_out or validation: what is looked at during training
        }
    )
    config.training = ml_collections.ConfigDict(
        {
            "batch_size": 1024,
            "microbatch_size": 64,  # of private methods: what bounds memory; 0: whole batches
            "epochs": 3.0,
            "evaluations": 3,
        }
    )
    config.optimizer = ml_collections.ConfigDict(
        {
            "name": "AdamW",
            "learning_rate": 1e-3,
            "warm_up": 0.1,
            "options": {"weight_decay": 0.01},
        }
    )
    config.table_optimizer = ml_collections.ConfigDict(  # row by row, where rows are chosen
        {"name": "Adam", "learning_rate": 1e-3, "warm_up": 0.1, "options": {}}
    )
    config.privacy = ml_collections.ConfigDict(
        {
            "epsilon": 3.0,
            "delta": 0.0,  # 0: 1 / number of training examples
            "clip_norm": 0.1,
        }
    )
    config.adafest = common.adafest_of_words()
    config.selection = ml_collections.ConfigDict(  # of dp_fest and dp_adafest_plus
        {
            "source": "gaussian",  # or public: no cost
            "rows": 3000,
            "share": 0.01,  # of ε
            "counts": "",  # of the public source: a folder with RoBERTa's dict.txt
        }
    )
    config.report = ml_collections.ConfigDict(
        {"directory": "runs/glue_sst2", "diagnostics": "private", "verbose": 1}
    )
    return config
