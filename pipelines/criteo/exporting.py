"""Whether a run can end with an export, found out before it begins."""

from pathlib import Path

import ml_collections

from pipelines.methods import NON_PRIVATE


def check(config: ml_collections.ConfigDict, path: str, *, on_tpu: bool) -> None:
    """Refuses what would be found out only after training; nothing for an empty path.

    Raises:
        ValueError: There is something at `path`, or the config trains without privacy, or has its
            tables in an embedding layer.
    """
    if not path:
        return
    if Path(path).exists():
        raise ValueError(f"Expected a path where nothing is yet, got export={path!r}.")
    if config.method == NON_PRIVATE:
        raise ValueError(
            "Expected a private method with export, which carries a statement of privacy, got "
            f"method={config.method!r}."
        )
    if on_tpu or config.tables != "keras":
        raise ValueError(
            "Expected tables in Keras' layers with export, got those of an embedding layer: use "
            "config.tables=keras, and no TPU."
        )
