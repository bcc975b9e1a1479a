"""The store's interface over S3's conditional writes, against moto's server: what a lake in a bucket would build on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etpi_resources.lake.store import Pointer, PointerMoved

BUCKET = "lake"
KEYS = {"access_key_id": "test", "secret_access_key": "test"}


class S3Store:
    """`Store` by `If-None-Match: *` (create) and `If-Match: <etag>` (update), through obstore."""

    def __init__(self, endpoint: str) -> None:
        from obstore.store import S3Store as Client

        self._client = Client(
            BUCKET, endpoint=endpoint, region="us-east-1", client_options={"allow_http": True}, **KEYS
        )  # fmt: skip

    def put_if_absent(self, path: str, source: Path | bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError

        try:
            self._client.put(path, source, mode="create")
        except AlreadyExistsError:
            return False
        return True

    def pointer(self, path: str) -> Pointer | None:
        try:
            result = self._client.get(path)
        except FileNotFoundError:
            return None
        return Pointer(bytes(result.bytes()), result.meta["e_tag"] or "")

    def swap(self, path: str, content: bytes, expected: Pointer | None) -> None:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            self._client.put(path, content, mode={"e_tag": expected.tag} if expected else "create")
        except (AlreadyExistsError, PreconditionError):
            raise PointerMoved(path) from None


@contextmanager
def s3_server() -> Iterator[str]:
    """Run moto's server with the bucket; yield its URL."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        boto3.client(
            "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
        ).create_bucket(Bucket=BUCKET)
        yield url
    finally:
        server.stop()
