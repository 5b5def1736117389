"""Attention maps of a study's models, beside one another: Figure 10 of Ding et al. (ICML 2024).

They are computed from users' own items, so they are kept outside of the results, and only the
picture is published.
"""

from pathlib import Path

import keras
import matplotlib.figure
import numpy as np

from models.sequence_transformer import attention_maps
from pipelines.files import whole_file
from pipelines.movielens.run import Result

USERS, ITEMS = 5, 20  # in a picture: so many users, and the last items of each
_KINDS = ("re_attention", "vanilla")


def save(result: Result, folder: Path, model: str, epsilon: float) -> None:
    """Keeps the first block's scores for the first users with a whole history, float32."""
    if model not in _KINDS:
        return
    whole = result.users.histories[(result.users.histories > 0).all(axis=1)][:USERS]
    blocks = keras.tree.flatten(attention_maps(result.model)(whole))  # Keras unpacks a list of one
    scores = np.asarray(blocks[0])  # [users, heads, length, length]
    last = scores.mean(axis=1)[:, -ITEMS:, -ITEMS:]
    with whole_file(_path(folder, model, epsilon)) as file:
        np.save(file, last.astype(np.float32))


def plot(folder: Path, epsilons: tuple[float, ...], path: Path) -> bool:
    """A row of maps for each model and ε; False if none are kept."""
    found = [
        (model, epsilon, np.load(_path(folder, model, epsilon)))
        for model in _KINDS
        for epsilon in epsilons
        if _path(folder, model, epsilon).exists()
    ]
    if not found:
        return False
    figure = matplotlib.figure.Figure(figsize=(9, 1.9 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), USERS, squeeze=False)
    for row, (model, epsilon, maps) in zip(axes, found, strict=True):
        for place, one in zip(row, maps, strict=False):
            place.imshow(one, cmap="viridis", vmin=0, vmax=np.quantile(maps, 0.99))
            place.set_xticks([])
            place.set_yticks([])
        row[0].set_ylabel(f"{model}\nε = {epsilon:g}", fontsize=8)
    for user, place in enumerate(axes[0], 1):
        place.set_title(f"user {user}", fontsize=8)
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=110)
    return True


def _path(folder: Path, model: str, epsilon: float) -> Path:
    return folder / f"{model}_{epsilon:g}.npy"
