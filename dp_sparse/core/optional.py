"""Libraries that the package can do without."""


def require_matplotlib(what: str) -> None:
    """Raises ImportError, with what installs it, if there is no matplotlib to draw `what` with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{what} needs matplotlib: pip install matplotlib.") from error
