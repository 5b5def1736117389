"""Made-up data in the shape of MovieLens-1M: ratings, users, films, and the order of each user.

Users and films have vectors, which follow in part from age, gender, occupation and genres. A rating
is the product of two vectors, plus how generous the user and how good the film is, plus noise. A
user has seen popular films, and films that fit, in the order of a mood that changes slowly.
"""

import dataclasses

import numpy as np

USERS, FILMS = 6_040, 3_706
AGES, GENDERS, OCCUPATIONS, AREAS, GENRES, WORDS = 7, 2, 21, 100, 18, 2_000
LENGTH, LEAST, MEDIAN = 4, 20, 96  # words of a title; ratings of a user
_DIM = 6


@dataclasses.dataclass(frozen=True)
class MovieLens:
    """All tables; ids of users and films begin at 1, and words and genres are padded with 0.

    Attributes:
        user_id: int32 `[ratings]`; the ratings of a user are in one piece, in the order of time.
        movie_id: int32 `[ratings]`.
        rating: float32 `[ratings]`, 1 to 5.
        users: int32 `[users + 1]`, by the names age, gender, occupation and area.
        titles: int32 `[films + 1, 4]`, words from 1 on.
        genres: int32 `[films + 1, 3]`, genres from 1 on.
    """

    user_id: np.ndarray
    movie_id: np.ndarray
    rating: np.ndarray
    users: dict[str, np.ndarray]
    titles: np.ndarray
    genres: np.ndarray

    @property
    def num_users(self) -> int:
        """With user 0, whom nobody is."""
        return len(self.users["age"])

    @property
    def num_films(self) -> int:
        """With film 0, which is padding."""
        return len(self.titles)

    def of_users(self) -> list[np.ndarray]:
        """The places of each user's ratings, in the order of time."""
        places = np.arange(len(self.user_id))
        return np.split(places, np.flatnonzero(np.diff(self.user_id)) + 1)

    def sequences(self) -> list[np.ndarray]:
        """The films of each user, in the order of time."""
        return [self.movie_id[places] for places in self.of_users()]


def made_up(users: int = USERS, films: int = FILMS, seed: int = 0) -> MovieLens:
    """A world: the same for the same numbers."""
    rng = np.random.default_rng(seed)
    sizes = {"age": AGES, "gender": GENDERS, "occupation": OCCUPATIONS, "area": AREAS}
    about = {name: rng.integers(0, size, users + 1, np.int32) for name, size in sizes.items()}
    of_user = rng.normal(0, 0.7, (users + 1, _DIM))
    for name in ("age", "gender", "occupation"):
        of_user += rng.normal(0, 0.4, (sizes[name], _DIM))[about[name]]
    genres = rng.integers(1, GENRES + 1, (films + 1, 3), np.int32)
    genres[:, 1:] *= rng.random((films + 1, 2)) < 0.5
    of_genre = rng.normal(0, 1, (GENRES + 1, _DIM))
    of_film = rng.normal(0, 0.6, (films + 1, _DIM)) + 0.8 * of_genre[genres[:, 0]]
    good = rng.normal(0, 0.55, films + 1)
    words = (rng.pareto(1.0, (films + 1, LENGTH)) * 20).astype(np.int32) % WORDS + 1
    words[:, 0] = genres[:, 0]  # a word that says the genre
    fits = of_user @ of_film.T / np.sqrt(_DIM)
    popular = rng.permutation(-0.9 * np.log(np.arange(films) + 30)) + 0.5 * good[1:]
    counts = np.exp(rng.normal(np.log(MEDIAN), 1, users))
    counts = np.clip(counts, LEAST, films // 2).astype(int)
    user_id, movie_id = [], []
    for user, count in enumerate(counts, 1):
        wish = popular + 0.7 * fits[user, 1:] + rng.gumbel(size=films)
        seen = 1 + np.argpartition(-wish, count)[:count]
        mood = of_film[seen] @ rng.normal(size=_DIM) + rng.normal(0, 0.5, count)
        user_id.append(np.full(count, user, np.int32))
        movie_id.append(seen[np.argsort(mood)].astype(np.int32))
    user, film = np.concatenate(user_id), np.concatenate(movie_id)
    generous = rng.normal(0, 0.45, users + 1)
    score = 3.3 + generous[user] + good[film] + 0.5 * fits[user, film]
    rating = np.clip(np.rint(score + rng.normal(0, 0.75, len(film))), 1, 5).astype(np.float32)
    return MovieLens(user, film, rating, about, words, genres)
