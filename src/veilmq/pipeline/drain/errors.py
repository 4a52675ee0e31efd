"""What can be wrong with a drain, each with its mend."""

from veilmq.pipeline.errors import PipelineError


class DirectoryTaken(PipelineError):
    """Another query has the manifest directory."""


class DirectoryForeign(PipelineError):
    """The manifest directory is of another query or another queue."""


class DirectoryUnwritable(PipelineError):
    """The manifest directory takes no file: its disk is full, or it may not be written."""


class ManifestDamaged(PipelineError):
    """A manifest is missing, or is not what was written."""


class TableForeign(PipelineError):
    """The table is another query's, or of another format."""


class DrainUnfinished(PipelineError):
    """The queue did not become empty in the time given."""
