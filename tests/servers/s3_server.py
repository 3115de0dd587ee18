"""An S3 server that tests talk to: where it is, how to log in, and a plain client beside the code under test."""

from __future__ import annotations

import functools
import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

REGION = "us-east-1"


@dataclass(frozen=True)
class S3Server:
    """A server with one bucket. Key and secret are made up anew for each."""

    endpoint_url: str
    bucket: str = "magic"
    key: str = field(default_factory=lambda: f"MAGIC{secrets.token_hex(8).upper()}")
    secret: str = field(default_factory=lambda: secrets.token_hex(20))

    def bucket_url(self) -> str:
        """A prefix that nobody else uses."""
        return f"s3://{self.bucket}/{uuid.uuid4().hex}"

    @property
    def options(self) -> dict[str, Any]:
        """`storage_options` of an experiment."""
        return {"endpoint_url": self.endpoint_url, "region": REGION, "key": self.key, "secret": self.secret}

    @property
    def environment(self) -> dict[str, str]:
        """The same for a process that gets no options."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
        }

    def behind(self, endpoint_url: str) -> S3Server:
        """The same server, asked through a proxy there."""
        return replace(self, endpoint_url=endpoint_url)

    def client(self) -> Any:
        """botocore's own client, which repeats nothing and believes what it reads. May be used by several threads."""
        return _client(self)

    def keys(self, url: str) -> list[str]:
        """The keys below a URL of this bucket, relative to it, sorted."""
        prefix = url.removeprefix(f"s3://{self.bucket}/") + "/"
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return sorted(found["Key"].removeprefix(prefix) for page in pages for found in page.get("Contents", []))

    def uploads(self, url: str) -> list[str]:
        """The keys of multipart uploads below a URL of this bucket that were begun and neither completed nor aborted."""
        prefix = url.removeprefix(f"s3://{self.bucket}/") + "/"
        found = self.client().list_multipart_uploads(Bucket=self.bucket, Prefix=prefix).get("Uploads", [])
        return sorted(upload["Key"].removeprefix(prefix) for upload in found)


@functools.cache  # botocore takes a quarter of a second to make one
def _client(server: S3Server) -> Any:
    import botocore.config
    import botocore.session

    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=server.endpoint_url,
        region_name=REGION,
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        config=botocore.config.Config(
            retries={"total_max_attempts": 1},
            connect_timeout=2,
            read_timeout=20,
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"},
        ),
    )


def make_bucket(server: S3Server, still_runs: Callable[[], None], seconds: float = 60) -> None:
    """Waits until the server has made the bucket and taken an object.

    Args:
        still_runs: raises when waiting is in vain.

    Raises: what `still_runs` raises; TimeoutError with the last answer.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    client, ends = server.client(), time.monotonic() + seconds
    while True:
        try:
            if server.bucket not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
                client.create_bucket(Bucket=server.bucket)
            client.put_object(Bucket=server.bucket, Key="ready", Body=b"ready")
            return
        except (BotoCoreError, ClientError) as error:
            still_runs()
            if time.monotonic() > ends:
                raise TimeoutError(f"{server.endpoint_url} takes no object after {seconds} s: {error}") from error
            time.sleep(0.05)
