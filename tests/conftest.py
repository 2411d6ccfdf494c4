"""Settings that must be in place before any test module imports Prefect, and an S3 store for tests."""

import os
import tempfile
from collections.abc import Iterator

import pytest

from tests.s3_server import S3_ENVIRONMENT, s3_server

# Prefect's own test harness isolates the database but not the stored results: a home of its own does both.
_HOME = tempfile.TemporaryDirectory(prefix="dspark-prefect-")
os.environ["PREFECT_HOME"] = _HOME.name
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"
os.environ["PREFECT_SERVER_LOGGING_LEVEL"] = "CRITICAL"
os.environ.pop("PREFECT_API_URL", None)
os.environ.pop("DSPARK_STORE", None)
os.environ.pop("DSPARK_WORK", None)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The endpoint of an S3-protocol server process with a bucket named `bucket`."""
    with s3_server("bucket") as endpoint:
        yield endpoint


@pytest.fixture
def s3_root(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """An empty prefix in S3, with the environment that reaches it."""
    import s3fs

    for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": s3_endpoint}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    return f"s3://bucket/{request.node.name.replace('[', '-').replace(']', '')}"
