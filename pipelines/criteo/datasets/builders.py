"""The builders of Criteo Kaggle and Criteo 1TB, from files that the user has downloaded.

An example is a row as it is in the file: `label`, 0 or 1; `int`, 13 counts; `cat`, 26 categories,
which are hexadecimal numbers of 32 bits. A missing count is −2⁶³ and a missing category is 2³², so
neither is any number of the data. Nothing is hashed: `pipelines.criteo.schema.model_inputs` makes a
model's inputs of a batch, as the rest of the pipeline does. Examples of a split keep their order in
the file, which is that of time. Malformed lines are in no split: they go to `quarantine/` in the
folder of the data set, as private as the data, and `info.metadata` has their numbers by reason.
"""

import warnings
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from pipelines.criteo.datasets.rows import QUARANTINE, collected_reports, examples_of
from pipelines.criteo.days import files_of
from pipelines.criteo.schema import NUM_CATEGORIES, NUM_INTEGERS

DAYS = 24
_HOMEPAGE = "https://ailab.criteo.com/ressources/"


class _Metadata(tfds.core.MetadataDict):
    """What is known of each split: `rows`, `quarantined` by reason, `sha256` of the plain text."""

    def save_metadata(self, data_dir: Any) -> None:
        self.update(collected_reports(str(data_dir)))
        bad = {name: of["quarantined"] for name, of in self.items() if of["quarantined"]}
        if bad:
            warnings.warn(
                f"Malformed lines are in {QUARANTINE}/, not in splits: {bad}.", stacklevel=2
            )
        super().save_metadata(data_dir)


class _Criteo(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """What both data sets share: examples, and how files become splits."""

    VERSION = tfds.core.Version("1.0.0")
    # Nothing is downloaded, so there are no checksums of downloads: `info.metadata` has digests.
    # Looking for them would also need a package that tensorflow-datasets 4.9.10 does not require.
    url_infos = None
    _NAMES: tuple[str, ...] = ()

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "label": tfds.features.ClassLabel(num_classes=2),
            "int": tfds.features.Tensor(shape=(NUM_INTEGERS,), dtype=np.int64),
            "cat": tfds.features.Tensor(shape=(NUM_CATEGORIES,), dtype=np.int64),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=({"int": "int", "cat": "cat"}, "label"),
            homepage=_HOMEPAGE,
            disable_shuffling=True,
            metadata=_Metadata(),
        )

    def _split_names(self) -> tuple[str, ...]:
        return self._NAMES

    def _split_generators(self, dl_manager: Any, pipeline: Any) -> dict[str, Any]:
        paths = files_of(str(dl_manager.manual_dir), self._split_names())
        return {name: self._generate_examples(pipeline, name, paths[name]) for name in paths}

    def _generate_examples(self, pipeline: Any, name: str, path: str) -> Any:
        return examples_of(pipeline, name, path, folder=str(self.data_path))


class CriteoKaggle(_Criteo):
    """Click logs of seven days, as in Criteo's challenge on Kaggle: 45,840,617 rows, `train`."""

    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        "Accept Criteo's terms, download the display advertising challenge, and put its train.txt "
        "(or train.txt.gz) into manual_dir."
    )
    _NAMES = ("train",)


class CriteoTerabyte(_Criteo):
    """Click logs of 24 days, Criteo 1TB: some 4.4 billion rows; splits `day_0` to `day_23`.

    Config `all_days`, the default, has all of them; `first_N` has the first N.
    """

    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        "Accept Criteo's terms, download day_0.gz to day_23.gz of the terabyte click logs, and put "
        "them into manual_dir, plain or as they are."
    )
    _NAMES = tuple(f"day_{day}" for day in range(DAYS))
    BUILDER_CONFIGS = [  # noqa: RUF012
        tfds.core.BuilderConfig(name="all_days", description="All 24 days."),
        *(
            tfds.core.BuilderConfig(name=f"first_{days}", description="The first days.")
            for days in range(1, DAYS)
        ),
    ]

    def _split_names(self) -> tuple[str, ...]:
        _, _, days = self.builder_config.name.partition("first_")
        return self._NAMES[: int(days or DAYS)]
