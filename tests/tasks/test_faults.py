"""Retries are for faults outside the program."""

import errno

import botocore.exceptions
import httpx
import pytest

from tasks.faults import is_transient
from tasks.process import ProcessFailed
from tasks.recipe import RecipeError
from tasks.store import ArtifactDamagedError
from tasks.vllm_server import ServerDied


def s3_error(code: str, status: int) -> botocore.exceptions.ClientError:
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.exceptions.ClientError(answer, "PutObject")


def from_s3fs(cause: Exception) -> OSError:
    error = OSError(errno.EIO, "translated")
    error.__cause__ = cause
    return error


def http_error(status: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("", request=httpx.Request("GET", "http://x"), response=httpx.Response(status))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(),
        TimeoutError(),
        OSError(errno.ENETUNREACH, "no route"),
        httpx.ReadTimeout("slow"),
        httpx.ConnectError("refused"),
        http_error(503),
        http_error(429),
        botocore.exceptions.EndpointConnectionError(endpoint_url="http://x"),
        botocore.exceptions.ReadTimeoutError(endpoint_url="http://x"),
        s3_error("SlowDown", 503),
        from_s3fs(s3_error("InternalError", 500)),
        ServerDied("the engine died"),
    ],
    ids=repr,
)
def test_transient(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        RecipeError("no"),
        ArtifactDamagedError("no"),
        ProcessFailed(["train"], 1, ["tail"]),
        FileNotFoundError("no"),
        PermissionError("no"),
        OSError(errno.ENOSPC, "disk full"),
        MemoryError(),
        http_error(404),
        http_error(400),
        s3_error("AccessDenied", 403),
        from_s3fs(s3_error("NoSuchKey", 404)),
    ],
    ids=repr,
)
def test_permanent(error: Exception) -> None:
    assert not is_transient(error)
