"""Criteo pCTR with DP-AdaFEST at ε = 1 on a sample of about 100,000 rows.

Takes a minute on 2 cores.
"""

import ml_collections

from configs import common
from pipelines.criteo.schema import TABLE3_VOCABULARIES


def get_config() -> ml_collections.ConfigDict:
    """The defaults of the Criteo pipeline, as `dp_sparse.recommend` for large tables.

    `pipelines.methods` has all methods.
    """
    config = ml_collections.ConfigDict()
    config.method = "dp_adafest"
    config.model = "pctr"  # or dlrm or dcn, of keras-rs' layers; ranking with tables=layer
    config.tables = "keras"  # or layer: an embedding layer, as TPUs have them
    config.table_weights = ml_collections.ConfigDict(  # of pctr with tables=keras
        {"initial": "uniform", "lora_rank": 0, "trained": True}
    )
    config.seed = 0  # of the initial weights
    config.data = ml_collections.ConfigDict(
        {
            "path": "",  # a Criteo TSV or .gz
            "tfds": "",  # or what tensorflow-datasets has prepared: criteo_kaggle
            "tfds_split": "train",  # or day_0 of criteo_terabyte/first_1
            "directory": "",  # of tensorflow-datasets; by default its own
            "prepared": "",  # where the records go; by default beside the report
            "vocabularies": TABLE3_VOCABULARIES,
            "test_fraction": 0.1,  # the last rows in time
            "validation_fraction": 0.0,  # the rows before them, to choose hyper-parameters by
            # What trains instead of path's first rows; then all rows of path are held out.
            "offline": "",  # a folder of pipelines.criteo.prepare
            "service": "",  # where it is read: local, or grpc://HOST:PORT of a tf.data service
            "stream": "",  # or raw files, TSV or .gz, in the order of time: day_0.gz,day_1.gz
            "num_examples": 0,  # all lines of the stream
            "files_at_once": 1,  # files of the stream that are read in turns
        }
    )
    config.training = ml_collections.ConfigDict(
        {"batch_size": 4096, "epochs": 2.0, "evaluations": 8}
    )
    config.optimizer = ml_collections.ConfigDict(
        {
            "name": "Adam",
            "options": {"learning_rate": 0.01},
            "decays": True,  # to 0 along a line: late steps of noise make probabilities extreme
            # With noise the rate is at most this / √steps, as in `dp_sparse.recommend`: noise alone
            # then moves a weight by about as much in the whole run. 0: the rate stays.
            "walk": 0.2,
        }
    )
    config.privacy = ml_collections.ConfigDict(
        {
            "epsilon": 1.0,
            "delta": 0.0,  # 0: 1 / number of training rows
            "clip_norm": 1.0,
            # The share of gradients that shall stay unclipped: the clip norm follows their norms.
            # Where most are clipped, probabilities drift from the true rate. 0: clip_norm stays.
            "clip_quantile": 0.95,
            # The share of epsilon for the histogram that calibrates probabilities; 0 for none.
            # There is none with tables=layer, nor with batches that were drawn before training.
            "calibration_share": 0.01,
        }
    )
    config.adafest = common.adafest()
    config.selection = ml_collections.ConfigDict(  # of dp_fest and dp_adafest_plus
        {"source": "gaussian", "rows": 3000, "share": 0.01}
    )
    config.exponential = ml_collections.ConfigDict({"rows_per_step": 1000, "noise_ratio": 1.0})
    config.report = ml_collections.ConfigDict(
        {"directory": "runs/criteo", "diagnostics": "private", "points": 20, "verbose": 1}
    )
    return config
