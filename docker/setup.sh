#!/bin/sh
# Prepare a fresh Prefect server and S3 store; run again, it changes nothing. Needs PREFECT_API_URL, DSPARK_STORE and
# the AWS_* variables.
set -eu

python - <<'PYTHON'
import os
import time

import s3fs
from botocore.exceptions import BotoCoreError

bucket = os.environ["DSPARK_STORE"].removeprefix("s3://").split("/", 1)[0]
for attempt in range(30):
    try:
        store = s3fs.S3FileSystem(skip_instance_cache=True)
        if not store.exists(bucket):
            store.mkdir(bucket)
        break
    except (OSError, BotoCoreError) as error:  # not up yet
        if attempt == 29:
            raise SystemExit(f"{os.environ.get('AWS_ENDPOINT_URL', 'S3')} does not answer: {error}") from error
        time.sleep(2)
print(f"bucket {bucket} is there")
PYTHON

prefect work-pool inspect dspark >/dev/null 2>&1 || prefect work-pool create dspark --type process
prefect --no-prompt deploy --all --prefect-file deployments/prefect.yaml
