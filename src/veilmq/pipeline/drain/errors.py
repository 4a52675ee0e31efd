"""The errors of a drain, each with its remedy."""

from veilmq.pipeline.errors import PipelineError


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


class DrainUnfinished(PipelineError):
    """The queue did not become empty in the given time."""
