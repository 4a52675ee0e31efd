"""What can be wrong with a pipeline, each with its mend.

Strategy: Spark wraps an exception of a worker into a long trace; the sentence at its end is what a person reads, so it
names what is wrong and what to do.
"""


class PipelineError(Exception):
    """What is wrong, and its mend."""

    def __init__(self, wrong: str, mend: str) -> None:
        super().__init__(f"{wrong} {mend}".strip())
        self.wrong = wrong
        self.mend = mend

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.wrong, self.mend)


class Unready(PipelineError):
    """Java or a package that Spark needs is missing or too old."""


class OptionInvalid(PipelineError):
    """A data source's option that cannot be."""


class HistoryGap(PipelineError):
    """The history does not hold the offsets that were asked for."""


class HistoryNewer(PipelineError):
    """The history holds what this release does not know: a column, a kind or a schema of a later one."""


class SourceUnreachable(PipelineError):
    """No whole answer came: the server or queue cannot be reached, broke off, or is something else."""


class SourceRefused(PipelineError):
    """The server answered, and refuses."""


class TokenRefused(SourceRefused):
    """It does not know the token, or wants one."""
