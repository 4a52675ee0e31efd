"""The MNS adapter: Alibaba Cloud MNS, and whatever speaks its protocol, through aliyun-mns-sdk.

Strategy: `thread_clients` is the only module that meets the SDK's connections and exceptions, one client a thread,
because its objects are not thread-safe, and says what a code means; `messages` turns the port's values into the
service's and back; `queue` is the port.
"""

from veilmq.client.mns.queue import MnsAccount, MnsQueue

__all__ = ["MnsAccount", "MnsQueue"]
