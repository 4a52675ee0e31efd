"""The asyncio shell around the engine: HTTP listeners, credentials, settings, clocks, start-up and shut-down."""
