"""The sentences of a statement, for the tests that read some of them."""

HEADINGS = ["Guarantee", "Against an attacker", "Not covered", "Assumptions", "Mechanism"]


def sentences(statement: str) -> list[str]:
    """Its lines without headings and indentation."""
    return [line.strip() for line in statement.splitlines() if line not in HEADINGS]
