"""Spans over a request and its legs, by OpenTelemetry; made only when a place to send them was given."""

from __future__ import annotations

from typing import Any

from baton.http import Header, Request
from baton.proxy.fleet import ProxyInstance

_CARRIED = (b"traceparent", b"tracestate")


class TracingUnavailable(RuntimeError):
    """OpenTelemetry is not installed."""


class Span:
    """One span; ended once, whatever way its work ended."""

    __slots__ = ("context", "span")

    def __init__(self, span: Any, context: Any) -> None:
        self.span = span
        self.context = context

    def end(self, error: BaseException | None = None) -> None:
        from opentelemetry.trace import Status, StatusCode

        if error is not None:
            self.span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        self.span.end()

    def end_request(
        self,
        status: int,
        prefill: ProxyInstance | None,
        decode: ProxyInstance | None,
        error: BaseException | None,
        retries: int = 0,
    ) -> None:
        """End the span of a request with what came of it."""
        self.span.set_attribute("http.response.status_code", status)
        if retries:
            self.span.set_attribute("baton.retries", retries)
        for name, instance in (("baton.prefill", prefill), ("baton.decode", decode)):
            if instance is not None:
                self.span.set_attribute(name, instance.id)
        self.end(error)


class Tracer:
    """Makes spans and says them to engines in W3C headers.

    Args:
        endpoint: where OTLP over HTTP is taken, such as ``http://127.0.0.1:4318/v1/traces``.
        exporter: in place of it.

    Raises:
        TracingUnavailable: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str | None, exporter: Any = None) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=endpoint)
        except ImportError as error:
            raise TracingUnavailable("pip install 'baton-serve[trace]'") from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": "baton-proxy"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("baton.proxy")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = trace.SpanKind
        self._in_context = trace.set_span_in_context

    def request(self, request: Request) -> Span:
        """The span of a request, within the client's own when it sent one."""
        carrier = {name.decode(): value.decode("latin-1") for name, value in request.headers if name in _CARRIED}
        parent = self._propagator.extract(carrier)
        span = self._tracer.start_span(f"{request.method} {request.path}", parent, self._kind.SERVER)
        span.set_attribute("http.request.method", request.method)
        span.set_attribute("url.path", request.path)
        return Span(span, self._in_context(span, parent))

    def leg(self, parent: Span | None, instance: ProxyInstance, headers: list[Header]) -> tuple[Span, list[Header]]:
        """The span of one leg, and the headers of the leg, which name it."""
        context = parent.context if parent is not None else None
        span = self._tracer.start_span(str(instance.endpoint.role), context, self._kind.CLIENT)
        span.set_attribute("baton.instance", instance.id)
        carrier: dict[str, str] = {}
        own = self._in_context(span, context)
        self._propagator.inject(carrier, own)
        said = [(name.encode(), value.encode()) for name, value in carrier.items()]
        return Span(span, own), [pair for pair in headers if pair[0] not in _CARRIED] + said

    def close(self) -> None:
        """Send what is still here."""
        self._provider.shutdown()
