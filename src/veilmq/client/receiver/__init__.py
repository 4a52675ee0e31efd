"""The receiver: hundreds of callers, one parked poll (the documents' MessageReceiver).

Strategy: a pure exchange decides who gets what and which requests to make (exchange.py); runners make them
(polling.py); callers sleep as threads or as coroutines (receiver.py). docs/patterns/receiver.md explains it.
"""

from veilmq.client.receiver.receiver import AsyncReceiver, Receiver

__all__ = ["AsyncReceiver", "Receiver"]
