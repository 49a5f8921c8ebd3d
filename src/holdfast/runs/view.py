"""What there is in a run: its steps, and where they are. Changes nothing; knows no other rank."""

from .directory import Run


class RunView:
    """The directory of a run, as one process sees it."""

    _run: Run

    @property
    def root(self) -> str:
        """Directory of the run."""
        return self._run.root

    def steps(self) -> list[int]:
        """Return the committed steps, ascending, as this rank sees them.

        Raises:
            StoreError: the disk or the network failed.
        """
        return self._run.steps()

    def path(self, step: int) -> str:
        """Return the directory of ``step``, which need not exist.

        Raises:
            OptionError: ``step`` is not an integer from 0.
        """
        return self._run.path(step)
