"""The data sources that `register` registers, one row each."""

from veilmq.pipeline.drain.source import QueueSource
from veilmq.pipeline.events.source import EventsSource
from veilmq.pipeline.sinks.delta import DeltaSink

SOURCES = (EventsSource, QueueSource, DeltaSink)
