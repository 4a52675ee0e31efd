"""Calls SQS through the botocore of the environment that runs it: a call a line in, its answer a line out.

    python botocore_program.py ENDPOINT

Run by tests/clients/sqs_clients.py, which says what the lines are.
"""

import base64
import json
import re
import sys

import botocore.session
from botocore.config import Config
from botocore.exceptions import ClientError

assert botocore.__version__ == "1.31.80", botocore.__version__


def unwrapped(value):
    return base64.b64decode(value["bytes"]) if value.keys() == {"bytes"} else value


def main() -> None:
    config = Config(retries={"total_max_attempts": 1})
    sqs = botocore.session.get_session().create_client("sqs", endpoint_url=sys.argv[1], config=config)
    assert sqs.meta.service_model.protocol == "query"
    for line in sys.stdin:
        operation, members = json.loads(line, object_hook=unwrapped)
        try:
            answer = getattr(sqs, re.sub(r"(?<!^)(?=[A-Z])", "_", operation).lower())(**members)
        except ClientError as error:
            said = {"code": error.response["Error"]["Code"], "message": error.response["Error"]["Message"]}
        else:
            del answer["ResponseMetadata"]
            said = {"answer": answer}
        print(json.dumps(said, default=lambda value: {"bytes": base64.b64encode(value).decode()}), flush=True)


main()
