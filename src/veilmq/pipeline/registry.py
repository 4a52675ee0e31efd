"""The data sources that `register` makes known, one row each."""

from veilmq.pipeline.events.source import EventsSource

SOURCES = (EventsSource,)
