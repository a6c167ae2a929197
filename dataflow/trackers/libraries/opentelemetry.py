"""OpenTelemetry: a trace for each step with spans of its groups, exported as the standard variables
say.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dataflow.history.describe import model_of
from dataflow.trackers.tracker import StepFigures, StepGroups, TrackedRun, Tracker

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
EXPORTER = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
LOOP, SAMPLE, REWARD, TRAIN, SYNC = "rl.loop", "rl.sample", "rl.reward", "rl.train", "rl.sync"
"""As proposed in open-telemetry/semantic-conventions-genai, issue 88."""


@dataclass(kw_only=True, eq=False)
class OpenTelemetryTracker(Tracker):
    """Below `rl.loop`, a step, `rl.sample` and `rl.reward` for each of its groups, `rl.train` and
    `rl.sync`. Times of groups are seen by looking at the ledger twice a second, and are no finer; a
    run that is over has those of steps.
    """

    packages: ClassVar[Sequence[str]] = (
        "opentelemetry.sdk",
        "opentelemetry.exporter.otlp.proto.http",
    )
    extra: ClassVar[str] = "opentelemetry"
    takes_groups: ClassVar[bool] = True
    rollouts_every: ClassVar[int] = 0

    def missing(self) -> str | None:
        """Also where nothing says whereto."""
        if (why := super().missing()) is not None:
            return why
        exporter = os.environ.get(EXPORTER, "otlp")
        if exporter not in ("otlp", "console"):
            return (
                f"spans go out as otlp or to the console, but {EXPORTER} is '{exporter}'; set it to"
                " otlp"
            )
        if exporter == "otlp" and not any(map(os.environ.get, ENDPOINTS)):
            return (
                "tracker opentelemetry sends spans where the standard variables say, but none of"
                f" {' and '.join(ENDPOINTS)} is set; set one, as in"
                f" {ENDPOINTS[0]}=http://localhost:4318"
            )
        protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), "http/protobuf")
        if exporter == "otlp" and protocol != "http/protobuf":
            return (
                f"spans go out over http/protobuf, but {_PROTOCOLS[1]} is '{protocol}'; set it to"
                " http/protobuf"
            )
        return None

    def start(self, run: TrackedRun) -> str:
        """Make the exporter; resources from OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME, too."""
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._trace: Any = trace
        own = {
            "rl.system": "dataflow-rl",
            "rl.run.id": run.name,
            "rl.algorithm": str(run.graph.get("name")),
        }
        if not os.environ.get("OTEL_SERVICE_NAME"):
            own["service.name"] = "dataflow-rl"
        if model := _model(run.graph):
            own["rl.model.name"] = model
        self._provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        self._spans: Any = InMemorySpanExporter()
        self._exporter = _exporter()
        self._provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self._tracer = self._provider.get_tracer("dataflow")
        return (
            "spans go to"
            f" {next(filter(None, map(os.environ.get, reversed(ENDPOINTS))), 'the console')}"
        )

    def log(self, figures: StepFigures) -> None:
        """Lines of metrics are no spans."""

    def groups(self, groups: StepGroups) -> None:
        """The spans of one step."""
        times = [time for states in groups.seen.values() for time in states.values()]
        seconds = {
            name: value for name, value in groups.metrics.items() if isinstance(value, int | float)
        }
        end = groups.at
        train = min(end, max(end - float(seconds.get("seconds_step", 0.0)), 0.0))
        begin = min([train, *times, *([] if groups.began is None else [groups.began])])
        sizes = {
            "rl.sample.batch_size": len(groups.seen),
            "rl.train.batch_size": len(groups.seen) - len(groups.dropped),
        }
        loop = self._tracer.start_span(
            LOOP,
            start_time=_ns(begin),
            context=self._trace.set_span_in_context(self._trace.INVALID_SPAN),
            attributes={
                "rl.loop.iteration": groups.step,
                "dataflow.node": groups.node,
                "dataflow.source": groups.source,
                **sizes,
                **{
                    f"dataflow.{name}": float(v)
                    for name, v in seconds.items()
                    if not isinstance(v, bool)
                },
            },
        )
        inside = self._trace.set_span_in_context(loop)
        for group, states in groups.seen.items():
            self._group(group, states, groups.dropped.get(group), train, inside)
        self._span(TRAIN, train, end, inside, {"rl.loop.iteration": groups.step})
        published = float(seconds.get("seconds_publish", 0.0))
        self._span(SYNC, end, end + published, inside, {"rl.loop.iteration": groups.step})
        loop.end(end_time=_ns(end + published))

    def flush(self) -> None:
        """Send what there is. Errors: RuntimeError where the endpoint does not take it."""
        spans = self._spans.get_finished_spans()
        if spans and self._exporter.export(spans).name != "SUCCESS":
            raise RuntimeError(f"{len(spans)} spans were not taken")
        self._spans.clear()

    def finish(self, outcome: str) -> None:
        """Close what was opened."""
        self._provider.shutdown()
        self._exporter.shutdown()

    def _group(
        self, group: int, seen: Mapping[str, float], reason: str | None, train: float, inside: Any
    ) -> None:
        """Generated and scored; what nobody saw in time has no span."""
        named = {
            "dataflow.group_id": group,
            **({} if reason is None else {"dataflow.drop_reason": reason}),
        }
        begin = seen.get("generating", seen.get("issued"))
        done = seen.get("generated", seen.get("scored", train))
        if begin is not None:
            events = [("rl.issued", seen["issued"])] if "issued" in seen else []
            self._span(SAMPLE, begin, max(begin, done), inside, named, events, reason)
        if "generated" in seen:
            scored = max(seen["generated"], seen.get("scored", train))
            self._span(REWARD, seen["generated"], scored, inside, named, (), reason)

    def _span(
        self,
        name: str,
        begin: float,
        end: float,
        inside: Any,
        attributes: Mapping[str, Any],
        events: Sequence[tuple[str, float]] = (),
        error: str | None = None,
    ) -> None:
        span = self._tracer.start_span(
            name, context=inside, start_time=_ns(begin), attributes=dict(attributes)
        )
        for event, at in events:
            span.add_event(event, timestamp=_ns(at))
        if error is not None:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, error))
        span.end(end_time=_ns(end))


def _exporter() -> Any:
    if os.environ.get(EXPORTER, "otlp") == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _model(graph: Mapping[str, Any]) -> str:
    return next(
        (
            str(model["name"])
            for model in map(model_of, graph.get("nodes", ()))
            if model.get("name")
        ),
        "",
    )
