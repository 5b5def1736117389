"""The Criteo data sets for `tensorflow-datasets`; importing this registers them.

`tfds.load("criteo_terabyte/first_2", split="day_0")` and `tfds.load("criteo_kaggle")`. The data set
that `tensorflow-datasets` itself calls `criteo` is another one, on uplift. `builders.py` says what
an example is; `rows.py` has the steps of Apache Beam.
"""

from pipelines.criteo.datasets.builders import CriteoKaggle, CriteoTerabyte

__all__ = ["CriteoKaggle", "CriteoTerabyte"]
