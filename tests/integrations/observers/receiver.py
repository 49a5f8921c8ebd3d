"""A receiver of OTLP over HTTP: prints its port, then what it was sent, one JSON line a request.

It decodes with `opentelemetry-proto`, the messages of the OpenTelemetry project. The collector
itself is a program in Go, in no registry that these tests may use.
"""

import gzip
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

SERVICES: dict[str, tuple[Any, Any]] = {
    "/v1/traces": (ExportTraceServiceRequest, ExportTraceServiceResponse),
    "/v1/metrics": (ExportMetricsServiceRequest, ExportMetricsServiceResponse),
}


class Receiver(BaseHTTPRequestHandler):
    """Decodes each request, and answers as a collector does."""

    def do_POST(self) -> None:
        """Take one export."""
        if self.path not in SERVICES or self.headers["Content-Type"] != "application/x-protobuf":
            self.send_error(404)
            return
        request, response = (make() for make in SERVICES[self.path])
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Content-Encoding"] == "gzip":
            data = gzip.decompress(data)
        request.ParseFromString(data)
        print(json.dumps({"path": self.path, "request": MessageToDict(request)}), flush=True)
        answer = response.SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        print(server.server_address[1], flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            sys.exit(0)
