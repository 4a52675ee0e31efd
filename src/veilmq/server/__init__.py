"""The asyncio shell around the engine: HTTP listeners, credentials, settings, clocks, startup and shutdown."""
