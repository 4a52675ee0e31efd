"""HTTP delivery: sends what is published to a topic to the endpoints of its push subscriptions.

Strategy: each copy to push is a message in the subscription's hidden queue, and a push is a lease of it. After a
delivery the message is deleted; after a failure its lease is extended until the next attempt is due. So this room has
no state that a restart could lose: it only sends, and the engine keeps the rest. Source: docs/mns.md, "Pushes".
"""

from typing import Final

KEY_FILE: Final = "push-key.pem"
CERTIFICATE_FILE: Final = "push-certificate.pem"
CERTIFICATE_PATH: Final = "/veilmq-push.pem"
"""Where the MNS port serves the certificate."""
