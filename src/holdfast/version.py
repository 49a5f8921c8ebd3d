"""Which holdfast this is, and what to install. Knows nothing else."""

import os

__version__ = "0.1.0"
DISTRIBUTION = "holdfast-checkpoint"  # on PyPI, where the name "holdfast" is another project's
OTHER = "holdfast"


def install_hint(extra: str = "") -> str:
    """Return the command that installs holdfast with an extra.

    Example:
        ``install_hint("sign")`` is ``pip install 'holdfast-checkpoint[sign]'``.
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"


def needs(package: str, extra: str, what: str) -> str:
    """Return the text of an error: a package is missing.

    Example:
        ``needs("torch", "torch", "save")`` names the package, and the command that installs it.
    """
    return f"{what} needs {package}, which is not installed. Run: {install_hint(extra)}"


def warn_of_other(packages: str) -> None:
    """Warn if the other project named holdfast is installed in the same directory.

    Both have a package of this name: which of the two is imported depends on their order of
    installation, and removing one damages the other.

    Args:
        packages: the directory of installed packages that this one is in.
    """
    try:
        names = os.listdir(packages)
    except OSError:  # imported from an archive
        return
    start, ends = f"{OTHER}-", (".dist-info", ".egg-info")
    if any(name.startswith(start) and name.endswith(ends) for name in names):
        import warnings

        warnings.warn(
            f"{packages} also holds another project's package, {OTHER!r}, whose files mix with "
            f"those of {DISTRIBUTION}. Run: pip uninstall {OTHER} {DISTRIBUTION}, then: "
            f"{install_hint()}",
            RuntimeWarning,
            stacklevel=3,
        )
