"""The errors of the pipeline, each with its remedy.

Strategy: Spark wraps a worker's exception in a long trace. People read the sentence at its end, so that sentence says
what is wrong and what to do.
"""

from veilmq.model.errors import QueueMissing, UsageError, VeilError


class PipelineError(Exception):
    """What is wrong, and how to fix it."""

    def __init__(self, wrong: str, mend: str) -> None:
        super().__init__(f"{wrong} {mend}".strip())
        self.wrong = wrong
        self.mend = mend

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.wrong, self.mend)


def unusable(queue: str, error: VeilError) -> tuple[str, str]:
    """What is wrong with a queue that could not be opened, and how to fix it. queue: which one, to begin the sentence
    with."""
    if isinstance(error, QueueMissing):
        return f"{queue} does not exist: {error}.", "Create it, or correct the name."
    return f"{queue} cannot be used: {error}.", "" if isinstance(error, UsageError) else "Is it there?"


class Unready(PipelineError):
    """Java or a package that Spark needs is missing or too old."""


class OptionInvalid(PipelineError):
    """A data source's option has an invalid value."""


class HistoryGap(PipelineError):
    """The history does not contain the requested offsets."""


class HistoryNewer(PipelineError):
    """The history contains a column, kind or schema of a later release."""


class SourceUnreachable(PipelineError):
    """No complete answer: the server or queue is unreachable, the connection broke, or something else answered."""


class SourceRefused(PipelineError):
    """The server answered with a refusal."""


class TokenRefused(SourceRefused):
    """The server does not know the token, or requires one."""


class DirectoryTaken(PipelineError):
    """Another query is using the manifest directory."""


class DirectoryForeign(PipelineError):
    """The manifest directory belongs to another query or another queue."""


class DirectoryUnwritable(PipelineError):
    """The manifest directory cannot be written: the disk is full, or permission is missing."""


class ManifestDamaged(PipelineError):
    """A manifest is missing or was changed."""


class TableForeign(PipelineError):
    """The table belongs to another query or has another format."""


class DeltaRefused(PipelineError):
    """A Delta table does not accept these rows."""


class DrainUnfinished(PipelineError):
    """The queue did not become empty in the given time."""
