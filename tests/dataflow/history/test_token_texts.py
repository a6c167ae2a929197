"""Token ids have texts as soon as a tokenizer is at hand: of a checkpoint, or of the model that the
run began with.
"""

from pathlib import Path

from rigs.graphs import fake_graph
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dataflow import Devices, Model, plan
from dataflow.folder.ledger import Ledger
from dataflow.folder.run_folder import RunFolder
from dataflow.history.describe import consumers, describe, graph_facts, plan_facts
from dataflow.history.rollout_view import vocabulary_of
from dataflow.testing import FakeGenerator


def tokenizer(path: Path, word: str) -> None:
    path.mkdir(parents=True)
    Tokenizer(WordLevel({word: 0}, unk_token=word)).save(str(path / "tokenizer.json"))


def test_tokens_have_the_texts_of_the_newest_checkpoint_and_before_it_those_of_the_generators_model(
    tmp_path: Path,
) -> None:
    folder = RunFolder.create(tmp_path, "fakes")
    graph = fake_graph(generator=FakeGenerator(model=Model(str(tmp_path / "somebody's"))))
    with Ledger.create(folder.ledger, consumers(graph)) as ledger:
        describe(
            folder, ledger, graph_facts(graph), plan_facts(graph, plan(graph, Devices(cpus=2)))
        )
    assert vocabulary_of(folder) is None
    tokenizer(tmp_path / "somebody's", "begins")
    assert vocabulary_of(folder) == {0: "begins"}
    for step in (3, 20):
        tokenizer(folder.path / "checkpoints" / f"step-{step:06}", f"after {step}")
    assert vocabulary_of(folder) == {0: "after 20"}
