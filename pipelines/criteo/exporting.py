"""Whether a run can end with an export, found out before it begins."""

import ml_collections

from pipelines.exports import require_free, require_private


def check(config: ml_collections.ConfigDict, path: str, *, on_tpu: bool) -> None:
    """Refuses what would be found out only after training; nothing for an empty path.

    Raises:
        ValueError: There is something at `path`, or the config trains without privacy, or has its
            tables in an embedding layer.
    """
    if not path:
        return
    require_free(path)
    require_private(config.method)
    if on_tpu or config.tables != "keras":
        raise ValueError(
            "Expected tables in Keras' layers with export, got those of an embedding layer: use "
            "config.tables=keras, and no TPU."
        )
