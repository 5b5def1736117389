"""Pages that commands write."""

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the last line has no end."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def listed(names: Sequence[str]) -> str:
    """A, B and C."""
    return " and ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]])
