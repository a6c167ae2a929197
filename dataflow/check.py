"""Every reason to refuse a graph, one function each."""

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from dataflow.annotations import arrow_type, unites
from dataflow.errors import GraphError, is_whole, nearest
from dataflow.node import Generate, Learn, Operator, Source, Stream, Weights
from dataflow.records import DROP_REASON, LOGPROBS, SAMPLING_MASK, VALUES, group_faults
from dataflow.structure import (
    Structure,
    generators_of,
    group_size,
    prompts_of,
    sinks_of,
    sources_of,
)


def check(graph: Structure) -> None:
    """Raise GraphError with the first fault found."""
    for fault in faults(graph):
        raise GraphError(fault)


def faults(graph: Structure) -> Iterator[str]:
    """All faults of the finished graph, each in three parts: what is wrong, what was found, what to
    do.
    """
    for reason in _REASONS:
        yield from reason(graph)


def empty(graph: Structure) -> Iterator[str]:
    """A graph without a source does nothing."""
    if not any(isinstance(operator, Source) for operator in graph.operators.values()):
        yield (
            f"graph '{graph.name}' has no source, only {list(graph.operators)}; "
            "start it with g.source(Prompts(...)) or another Source"
        )


def unread_streams(graph: Structure) -> Iterator[str]:
    """Rows that go nowhere would fill their queue and stop the run."""
    read = {(s.node, s.source) for call in graph.calls for s in call.inputs}
    for call in graph.calls:
        if call.operator.kind != "sink" and (call.output.node, call.output.source) not in read:
            yield (
                f"nobody reads the stream of '{call.output.node}' (rows of '{call.output.source}'"
                f" with columns {list(call.output.columns)}); apply a trainer, Evaluate or another"
                " operator to it, or drop it"
            )


def two_trainers(graph: Structure) -> Iterator[str]:
    """One model has one trainer."""
    trainers: dict[Any, str] = {}
    for name, operator in graph.operators.items():
        if operator.trains and operator.uses is not None:
            first_trainer = trainers.setdefault(operator.uses, name)
            if first_trainer != name:
                yield (
                    f"'{first_trainer}' and '{name}' both train '{operator.uses.name}', and would"
                    " overwrite"
                    " each other; join their streams into one trainer, or give one another"
                    " Model(..., name=...)"
                )


def frozen_trainer(graph: Structure) -> Iterator[str]:
    """A frozen model cannot be trained."""
    for name, operator in graph.operators.items():
        if operator.trains and operator.uses is not None and operator.uses.is_frozen:
            yield (
                f"'{name}' trains '{operator.uses.name}', which is frozen(); give it the model"
                " without frozen()"
            )


def missing_feedback(graph: Structure) -> Iterator[str]:
    """A reader of a trained model must see what is learned."""
    trained = {
        op.uses: name for name, op in graph.operators.items() if op.trains and op.uses is not None
    }
    fed = {feedback.reader.name for feedback in graph.feedbacks}
    for name, operator in graph.operators.items():
        if operator.uses in trained and not operator.trains and name not in fed:
            yield (
                f"'{trained[operator.uses]}' trains '{operator.uses.name}' but '{name}' would never"
                f" see the new weights; add g.feedback({trained[operator.uses]}.weights, {name},"
                " max_staleness=...) or give it a frozen() model"
            )


def unknown_feedback(graph: Structure) -> Iterator[str]:
    """Both ends of a feedback must be in the graph."""
    for feedback in graph.feedbacks:
        for operator in (feedback.weights.trainer, feedback.reader):
            if graph.operators.get(operator.name) is not operator:
                yield (
                    f"a feedback names '{operator.name}', but the graph only has"
                    f" {list(graph.operators)}{nearest(operator.name, graph.operators)}; apply"
                    f" '{operator.name}' to a stream first"
                )


def mixed_sources(graph: Structure) -> Iterator[str]:
    """A trainer takes groups in the order of one source."""
    for name, operator in graph.operators.items():
        sources = sources_of(graph, name)
        if operator.trains and len(sources) > 1:
            yield (
                f"'{name}' would train on rows of {len(sources)} sources, {sources}, which have no"
                " common order; mix them in one Prompts(...), or train on one of them"
            )


def evaluated_and_trained(graph: Structure) -> Iterator[str]:
    """Held-out prompts must stay held out."""
    for source in graph.operators:
        sinks = sinks_of(graph, source)
        trainers = [s.name for s in sinks if s.trains]
        evaluations = [s.name for s in sinks if s.traits.every_steps]
        if trainers and evaluations:
            yield (
                f"rows of '{source}' are trained by '{trainers[0]}' and evaluated by"
                f" '{evaluations[0]}'; "
                f'evaluate prompts of their own: g.source(Prompts(..., name="held_out"))'
            )


def filtered_evaluation(graph: Structure) -> Iterator[str]:
    """An accuracy is that of all held-out prompts."""
    for call in graph.calls:
        if call.operator.traits.every_steps and DROP_REASON in call.inputs[0].columns:
            yield (
                f"'{call.operator.name}' evaluates rows of '{call.output.source}' behind a filter,"
                " and what is not scored there would count as an error; apply the @keep filters to"
                " the rows that are trained alone"
            )


def unlike_rounds(graph: Structure) -> Iterator[str]:
    """A round is one table, whatever sources its rows come from."""
    for name, operator in graph.operators.items():
        columns_seen: dict[str, tuple[str, pa.DataType]] = {}
        for call in graph.calls if operator.traits.every_steps else ():
            columns = call.inputs[0].columns if call.operator is operator else {}
            for column, kind in columns.items():
                source, first_kind = columns_seen.setdefault(column, (call.output.source, kind))
                if not unites(kind, first_kind):
                    yield (
                        f"'{name}' evaluates rows of several sources as one table, but column"
                        f" '{column}' is {first_kind} in "
                        f"those of '{source}' and {kind} in those of '{call.output.source}';"
                        " convert one of the two, "
                        f'or give each an evaluation of its own: Evaluate(..., name="...")'
                    )


def lonely_groups(graph: Structure) -> Iterator[str]:
    """A rule that compares siblings needs some; a filter may look at a single rollout."""
    for call in graph.calls:
        if not call.operator.traits.compares_siblings:
            continue
        source = call.output.source
        size = group_size(graph, source)
        if size == 1:
            yield (
                f"'{call.operator.name}' compares the rollouts of a group, but the groups of"
                f" '{source}' have 1 rollout; raise group_size to 2 or more, or use a rule per row"
            )


def too_little_in_flight(graph: Structure) -> Iterator[str]:
    """A step whose prompts cannot all be in flight at once never happens."""
    for name, operator in graph.operators.items():
        if not isinstance(operator, Learn):
            continue
        prompts = operator.step_prompts
        limit = operator.traits.capacity.queue_prompts
        if limit is not None and limit < prompts:
            yield (
                f"'{name}' may queue {limit} prompts but one of its steps needs {prompts}: this"
                f" graph would deadlock; raise queue_prompts to {prompts} or more, or lower"
                " prompts_per_step"
            )
        for generator in generators_of(graph, name):
            limit = generator.traits.capacity.in_flight
            if limit is not None and limit < prompts:
                yield (
                    f"'{generator.name}' may hold {limit} prompts in flight but one step of"
                    f" '{name}' needs {prompts}: this graph would deadlock; raise in_flight to"
                    f" {prompts} or more, or lower prompts_per_step"
                )


def untrained_reader(graph: Structure) -> Iterator[str]:
    """Where something is trained, a model that reads rollouts is trained too, or said to be
    frozen.
    """
    trained = {operator.uses: name for name, operator in graph.operators.items() if operator.trains}
    for name, operator in graph.operators.items():
        model = operator.uses
        if (
            model is None
            or model.is_frozen
            or model in trained
            or not trained
            or isinstance(operator, Generate)
        ):
            continue
        yield (
            f"'{name}' reads '{model.name}', which is not frozen() and which none of"
            f" {list(trained.values())} trains; give it that model's frozen(), or train it and add"
            f" g.feedback(trainer.weights, {name}, max_staleness=...)"
        )


def unlike_temperatures(graph: Structure) -> Iterator[str]:
    """Log-probabilities must be those of the distribution that was sampled from."""
    for name, operator in graph.operators.items():
        ours = operator.traits.sampling.temperature
        has_other_head = operator.uses is not None and operator.uses.head != "lm"
        if isinstance(operator, Generate) or ours is None or has_other_head:
            continue
        for generator in generators_of(graph, name):
            theirs = generator.traits.sampling.temperature
            if theirs is not None and theirs != ours:
                yield (
                    f"'{generator.name}' samples at temperature {theirs} but '{name}' computes"
                    f" log-probabilities at {ours}, so every ratio would be wrong; give both the"
                    " same temperature"
                )


def unrecorded_sampling(graph: Structure) -> Iterator[str]:
    """What sampling leaves out or penalises is known to whoever compares log-probabilities with the
    generator's.
    """
    operators = graph.operators.items()
    of_models = {
        name
        for name, operator in operators
        if operator.traits.sampling.temperature is not None
        and not operator.trains
        and not isinstance(operator, Generate)
    }
    for name, operator in operators:
        reads = {*operator.reads()}
        if operator.traits.training.compares_logprobs or (
            not operator.trains and LOGPROBS in reads and of_models & reads
        ):
            for generator in generators_of(graph, name):
                if (unrecorded := generator.traits.sampling.unrecorded) is not None:
                    knobs, way_out = unrecorded
                    yield (
                        f"'{generator.name}' samples with {knobs}, and '{name}' compares these"
                        " log-probabilities with a model's, of the distribution without, so every"
                        f" ratio would be wrong; {way_out}"
                    )


def unlike_layouts(graph: Structure) -> Iterator[str]:
    """Messages that a generator lays out are no text that a judge could read as it stands."""
    for name, operator in graph.operators.items():
        if isinstance(operator, Generate) or operator.traits.chat is not False:
            continue
        for generator in generators_of(graph, name):
            if generator.traits.chat:
                yield (
                    f"'{generator.name}' lays prompts out as chat messages but '{name}' would read"
                    f" their JSON as text; give '{name}' chat=True"
                )


def unlike_prompts(graph: Structure) -> Iterator[str]:
    """The JSON of chat messages is no text to go on from, and a text is no chat message."""
    for call in graph.calls:
        reader, source = call.operator, graph.operators[call.output.source]
        issues, takes = source.traits.chat, reader.traits.chat
        if not isinstance(reader, Generate) or issues is None or takes is None or issues == takes:
            continue
        generator = reader.name if reader.asks is None else reader.asks.name
        if issues:
            yield (
                f"'{source.name}' issues prompts as chat messages but '{reader.name}' would go on"
                f" from their JSON as from a text; give '{generator}' chat=True, or prompts that"
                " are"
                " texts"
            )
        else:
            yield (
                f"'{source.name}' issues prompts as texts but '{reader.name}' lays out chat"
                f" messages; give '{source.name}' chat=True, with which a text is a message of the"
                f" user's and a list one of each turn, or '{generator}' chat=False"
            )


def too_few_prompts(graph: Structure) -> Iterator[str]:
    """A source that ends before the first step."""
    for name, operator in graph.operators.items():
        if not isinstance(operator, Learn):
            continue
        for source in sources_of(graph, name):
            prompts = prompts_of(graph, source)
            if prompts is not None and prompts < operator.step_prompts:
                epochs = graph.operators[source].traits.source.epochs or 1
                yield (
                    f"'{source}' ends after {prompts} prompts ({prompts // epochs} rows, {epochs}"
                    f" epochs) but one step of '{name}' needs {operator.step_prompts}; give more"
                    " prompts or epochs, or lower prompts_per_step"
                )


def too_large_groups(graph: Structure, replicas: Mapping[str, int] | None = None) -> Iterator[str]:
    """A group whose rollouts may all be as long as they are allowed to fits on every edge, one of
    each replica.
    """
    for call in graph.calls:
        generator, source, traits = call.operator, call.output.source, call.operator.traits
        if not isinstance(generator, Generate) or traits.sampling.max_tokens is None:
            continue
        widest = {
            name: kind
            for c in graph.calls
            if c.output.source == source
            for name, kind in c.output.columns.items()
        }
        yield from group_faults(
            generator.name,
            widest,
            rollouts=group_size(graph, source) or 1,
            tokens=min(
                traits.sampling.max_tokens,
                traits.sampling.context_tokens or traits.sampling.max_tokens,
            ),
            ids_left=max(1, traits.sampling.top_k),
            senders=(replicas or {}).get(generator.name, 1),
        )


_REASONS = (
    empty,
    unread_streams,
    two_trainers,
    frozen_trainer,
    missing_feedback,
    unknown_feedback,
    mixed_sources,
    evaluated_and_trained,
    filtered_evaluation,
    unlike_rounds,
    lonely_groups,
    too_little_in_flight,
    untrained_reader,
    unlike_temperatures,
    unrecorded_sampling,
    unlike_layouts,
    unlike_prompts,
    too_few_prompts,
    too_large_groups,
)


def newest_fault(weights: Weights, reader: Operator) -> str | None:
    """Why an operator cannot read the newest weights of a trainer; None where it can."""
    trainer, trains, reads = weights.trainer, weights.trainer.uses, reader.uses
    assert trains is not None and reads is not None, "both have a model"
    if weights.decay:
        return (
            f"'{reader.name}' would read the newest average of '{trainer.name}', but max_staleness"
            " counts versions of the weights themselves; give"
            f" g.feedback({trainer.name}.weights.average(...), {reader.name}, every=...)"
        )
    if reads.is_frozen:
        return (
            f"'{reader.name}' reads frozen '{reads.name}', which never changes; "
            "drop the feedback, give it the model without frozen(), or refresh it with every=..."
        )
    if reads != trains:
        return (
            f"'{trainer.name}' trains '{trains.name}' but '{reader.name}' reads "
            f"'{reads.name}'{_difference(trains, reads)}; give both the same Model"
        )
    return None


def refresh_fault(weights: Weights, reader: Operator, every: Any) -> str | None:
    """Why an operator cannot be refreshed with every n-th version of a trainer; None where it
    can.
    """
    trainer, trains, reads = weights.trainer, weights.trainer.uses, reader.uses
    assert trains is not None and reads is not None, "both have a model"
    if not is_whole(every, 1):
        return (
            f"every counts steps between two versions and cannot be {every!r}; give a whole number"
            " of 1 or more"
        )
    if isinstance(reader, Generate):
        return (
            f"'{reader.name}' generates what '{trainer.name}' trains, so it needs the newest"
            f" version, but got every={every}; give it max_staleness=..., which says how old its"
            " weights may be"
        )
    if differs := [
        name for name in ("head", "dtype", "lora") if getattr(reads, name) != getattr(trains, name)
    ]:
        return (
            f"'{trainer.name}' trains '{trains.name}', whose weights '{reader.name}' cannot take"
            f" for '{reads.name}': they differ in {', '.join(differs)}; give it a Model that"
            " differs in source, name or frozen()"
            f" alone{', so here the one that is trained' if differs == ['lora'] else ''}"
        )
    if trains.lora is not None and reads.source != trains.source:
        return (
            f"'{trainer.name}' trains adapters of '{trains.source}', which are no change to"
            f" '{reads.source}' that '{reader.name}' reads; give it the Model that is trained"
        )
    return None


def missing_column(graph: Structure, operator: Operator, column: str, stream: Stream[Any]) -> str:
    """The message for a column that is read but not there, with who could provide it."""
    could = [
        name
        for name, candidate in graph.operators.items()
        if candidate is not operator
        and column in candidate.provides({})
        and not isinstance(candidate, Source)
    ]
    if could:
        do = f"'{could[0]}' provides it: apply '{operator.name}' behind it, or join the two streams"
    elif column in ("completion", "tokens", "logprobs", "versions", "mask"):
        do = "a Generator provides it: apply one first"
    elif column == SAMPLING_MASK:
        do = "a Generator provides it: give it sampling_mask=True"
    elif (maker := _maker(column)) is not None:
        do = f"apply {maker} first"
    else:
        do = f'add it to Prompts(columns=...), or apply a @scorer called "{column}" first'
    close = nearest(column, stream.columns)
    return (
        f"'{operator.name}' reads column '{column}', but '{stream.node}' provides"
        f" {list(stream.columns)}{close}; {do}"
    )


def _maker(column: str) -> str | None:
    """The forward operator that writes a column of this name, as one would spell it."""
    if column.endswith(f"_{LOGPROBS}"):
        return f'Logprobs(model.frozen(), name="{column}")'
    return {
        VALUES: 'Values(Model(..., head="value"))',
        "score": 'RewardModel(Model(..., head="score").frozen()), or a @scorer called "score",',
    }.get(column)


def wrong_type(operator: Operator, column: str, stream: Stream[Any], annotation: Any) -> str:
    """The message for a column whose type does not fit the reader's annotation."""
    kind = getattr(annotation, "__name__", str(annotation))
    return (
        f"'{operator.name}' reads column '{column}' as {kind}"
        f" ({arrow_type(annotation) or 'numbers'}), but '{stream.node}' provides it as"
        f" {stream.columns[column]}; change the annotation, or convert the column"
    )


def _difference(first: Any, second: Any) -> str:
    differs = [n for n in first.__dataclass_fields__ if getattr(first, n) != getattr(second, n)]
    return f" (they differ in {', '.join(differs)})" if differs else ""
