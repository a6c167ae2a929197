"""Adapters alone: a base that travels once, and after it nothing but the low-rank matrices beside
its layers.
"""

import torch
import transformers

from transport.weights import FlatLayout

RANK = 2


class Adapted(torch.nn.Linear):
    """A linear layer with a low-rank addition, lora_B @ lora_A."""

    def __init__(self, base):
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = torch.nn.Parameter(torch.randn(RANK, base.in_features) * 0.1)
        self.lora_B = torch.nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, inputs):
        return super().forward(inputs) + inputs @ self.lora_A.t() @ self.lora_B.t()


def is_adapter(name):
    return ".lora_" in name


def is_base(name):
    return not is_adapter(name)


def llama(seed):
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config).eval()
    for path, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and path != "lm_head":
            model.set_submodule(path, Adapted(module))
    return model.requires_grad_(False)


def chosen(model, which):
    return {name: tensor for name, tensor in model.named_parameters() if which(name)}


def logits(model):
    with torch.inference_mode():
        return model(input_ids=torch.arange(2, 12)[None]).logits


def test_a_reader_that_attaches_adapters_alone_computes_what_the_trainer_does(place):
    trainer, generator = llama(0), llama(1)
    first = place.writer(FlatLayout.of(chosen(trainer, is_base)))
    reader = place.reader("base", attach=chosen(generator, is_base), adopt="copy")
    first.publish(0, chosen(trainer, is_base))
    place.settle(first, reader)
    reader.close()
    first.close()
    writer = place.writer(FlatLayout.of(chosen(trainer, is_adapter)))
    reader = place.reader("adapters", attach=chosen(generator, is_adapter))
    base = {name: tensor.data_ptr() for name, tensor in chosen(generator, is_base).items()}
    for version in (1, 2, 3):
        for tensor in chosen(trainer, is_adapter).values():
            tensor.add_(torch.randn_like(tensor) * 0.1)
        writer.publish(version, chosen(trainer, is_adapter))
        place.settle(writer, reader)
        assert torch.equal(logits(generator), logits(trainer))
    assert {name: tensor.data_ptr() for name, tensor in chosen(generator, is_base).items()} == base
