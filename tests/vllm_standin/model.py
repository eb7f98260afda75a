"""Models as arithmetic on integers: exact, and sensitive to all that an attention kernel reads."""

from __future__ import annotations

import torch

from tests.vllm_standin.parts import PAGE

VOCABULARY = 97


class Attention:
    """A layer's cache, and attention as arithmetic: a weighted sum of all tokens seen so far."""

    def __init__(self, num_blocks, max_model_len):
        # The last page takes what is written for padding.
        self.cache = torch.zeros((num_blocks + 1) * PAGE, dtype=torch.int64)
        self._positions = torch.arange(max_model_len)

    def forward(self, values, positions, metadata, slots):
        scratch = len(self.cache) - 1
        self.cache[torch.where(slots >= 0, slots, scratch)] = values[: len(slots)]
        count = metadata.num_actual_tokens
        at = torch.arange(count)
        ends = metadata.query_start_loc[1:].long().contiguous()
        request = torch.searchsorted(ends, at, right=True).clamp(max=len(ends) - 1)
        table = metadata.block_table[request].long()
        where = table[:, self._positions // PAGE] * PAGE + self._positions % PAGE
        seen = self._positions <= positions[:count, None]
        seen &= self._positions < metadata.seq_lens[request][:, None]
        weights = self._positions * 7 + 3
        total = (self.cache[where] * weights * seen).sum(1)
        if metadata.scheduler_metadata is not None:
            # As a plan that says how long each request is: a wrong one spoils the result.
            planned = metadata.scheduler_metadata[: len(ends)][request]
            starts = metadata.query_start_loc.diff()[request] * 1000
            total = total + (planned - starts - metadata.seq_lens[request])
        result = values.clone()
        result[:count] += total
        return result % 1_000_003


class Model:
    """Some layers, one after the other."""

    def __init__(self, layers):
        self.layers = layers  # name to Attention

    def forward(self, hidden, positions, metadata, slots):
        for number, (name, layer) in enumerate(self.layers.items()):
            mixed = hidden * 31 + number + positions
            if metadata is None:
                continue
            hidden = layer.forward(mixed, positions, metadata[name], slots[name])
        return hidden

    @staticmethod
    def token(hidden):
        return hidden % VOCABULARY
