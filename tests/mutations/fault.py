"""What a planted fault is."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
    """One wrong line, and the tests that must notice it.

    Attributes:
        name: Of the mistake, in words joined by underscores.
        path: The file, from the root of the repository.
        old: The right text, which stands once in the file.
        new: The wrong one.
        tests: Test files or node ids, as few and as quick as will do.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """`text` of the file with the fault in it.

        Raises:
            ValueError: The right text does not stand in it exactly once.
        """
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"Expected the text of {self.name} once in {self.path}, got {found}.")
        return text.replace(self.old, self.new)
