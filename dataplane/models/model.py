"""What engines know of any model."""

from typing import Protocol

from torch import Tensor, nn

from octavo.dataplane.loading.grouped import GroupedMatrix
from octavo.dataplane.models.layers import ForwardState
from octavo.dataplane.models.shard import Split


class ModelConfig(Protocol):
    """The numbers that pools and graphs are made by."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class Model(nn.Module):
    """From token ids to logits, with the part of the weights that one rank has."""

    config: ModelConfig  # of the whole
    split: Split
    rotations: Tensor  # [num_tables, max_positions, head_dim]; no table where nothing is rotated

    def forward(self, token_ids: Tensor, state: ForwardState, logit_tokens: Tensor) -> Tensor:
        """The final hidden states at `logit_tokens`: ``[num_logits, hidden_size]``."""
        parts = self.body(self.embed(token_ids, state), state)
        return self.finish(*(part[logit_tokens] for part in parts))

    def embed(self, token_ids: Tensor, state: ForwardState) -> Tensor:
        """What the first layer reads: ``[num_tokens, hidden_size]``."""
        raise NotImplementedError

    def body(self, hidden: Tensor, state: ForwardState) -> tuple[Tensor, ...]:
        """All layers. Their result is the sum of the parts, each ``[num_tokens, hidden_size]``."""
        raise NotImplementedError

    def finish(self, *parts: Tensor) -> Tensor:
        """The final hidden states of some tokens, from what `body` returned for them."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, vocab_size]`` in float32."""
        raise NotImplementedError

    def weight_bytes(self) -> int:
        """Bytes of the weights as they were read; call it before layers lay them out anew."""
        tensors = {tensor.data_ptr(): tensor.nbytes for tensor in self.parameters()}
        held = (getattr(module, "weight", None) for module in self.modules())
        matrices = {id(matrix): matrix.nbytes for matrix in held if isinstance(matrix, GroupedMatrix)}
        return sum(tensors.values()) + sum(matrices.values())
