"""The MNS adapter: Alibaba Cloud MNS, and whatever speaks its protocol, through aliyun-mns-sdk.

Strategy: `thread_clients` is the only module that meets the SDK's connections and exceptions, one client a thread,
because its objects are not thread-safe; `errors` says what a code means; `sending` and `receiving` turn the port's
values into the service's and back; `account` and `queue` are the port.
"""

from veilmq.client.mns.account import MnsAccount
from veilmq.client.mns.queue import MnsQueue

__all__ = ["MnsAccount", "MnsQueue"]
