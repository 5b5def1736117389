"""Which rows of text contain which, word by word: each pair of rows is compared."""

from collections.abc import Sequence


def contains(outer: str, inner: str) -> bool:
    """Whether the words of `inner` stand in `outer`, one after the other."""
    own, words = outer.lower().split(), inner.lower().split()
    return any(
        own[begin : begin + len(words)] == words for begin in range(len(own) - len(words) + 1)
    )


def maximal_around(rows: Sequence[str]) -> list[set[str]]:
    """For each row the texts around it that no other text contains."""
    texts = {" ".join(row.lower().split()) for row in rows}
    maximal = {text for text in texts if not any(contains(other, text) for other in texts - {text})}
    return [{text for text in maximal if contains(text, row)} for row in rows]
