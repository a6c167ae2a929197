"""What is raised of a model that cannot be used."""

from dataflow.errors import RunError


class ModelError(RunError):
    """A model or tokenizer that could not be loaded: folder, shard, weights, or code that may not
    run.
    """

    is_lasting = True
