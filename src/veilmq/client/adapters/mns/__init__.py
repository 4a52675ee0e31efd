"""The MNS adapter: Alibaba Cloud MNS, and other services with its protocol, through aliyun-mns-sdk.

Strategy: `calls` is the only module that handles the SDK's connections and exceptions; it has one client a thread,
because the SDK's objects are not thread-safe, and converts the port's messages to the service's and back. `queue`
implements the port; `topics` has the service's own topics.
"""

from veilmq.client.adapters.mns.queue import MnsAccount, MnsQueue

__all__ = ["MnsAccount", "MnsQueue"]
