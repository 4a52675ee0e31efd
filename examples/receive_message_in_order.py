"""The document's receiver (document 002): twenty messages, in the order in which they were sent.

receive_message_in_order.py QUEUE_URL [SEQUENCE_FILE]
"""

import sys

import veilmq
from veilmq.client.documents import LocalDiskStorage, OrderedQueueWrapper

if len(sys.argv) < 2:
    sys.exit(__doc__)
url, file = sys.argv[1], (sys.argv[2:] or ["/tmp/mns_receive_message_seq_id"])[0]
with veilmq.connect(url) as myQueue:
    seqIdPS = LocalDiskStorage({"localFileName": file})
    orderedQueue = OrderedQueueWrapper(myQueue, receiveSeqIdPersistStorage=seqIdPS)
    received = 0
    while received < 20:
        recv_msg = orderedQueue.ReceiveMessageInOrder(5)
        if recv_msg is not None:
            received += 1
            print("orderedqueuewrapper receive message body is", recv_msg.getMessageBody(), flush=True)
    orderedQueue.close()  # acknowledges the last one; so does the program's normal end
    print("Finish receive 20 messages")
