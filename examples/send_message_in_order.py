"""The document's sender (document 002): twenty messages in order. Runs beside receive_message_in_order.py.

send_message_in_order.py QUEUE_URL [SEQUENCE_FILE]
"""

import sys

import veilmq
from veilmq.client.documents import LocalDiskStorage, Message, OrderedQueueWrapper

if len(sys.argv) < 2:
    sys.exit(__doc__)
url, file = sys.argv[1], (sys.argv[2:] or ["/tmp/mns_send_message_seq_id"])[0]
with veilmq.connect(url) as myQueue:
    seqIdPS = LocalDiskStorage({"localFileName": file})
    orderedQueue = OrderedQueueWrapper(myQueue, sendSeqIdPersistStorage=seqIdPS)
    for number in range(20):
        orderedQueue.SendMessageInOrder(Message(str(number)))
        print("orderedqueuewrapper: send message body", number, flush=True)
    orderedQueue.close()
