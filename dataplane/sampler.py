"""From the logits of a plan's draws to tokens and their log-probabilities."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.dataplane.host_copy import Array, HostCopy
from octavo.dataplane.slots import Ints, Slots
from octavo.kernels.reference import sampling as ops
from octavo.kernels.reference.sampling import DrawParams
from octavo.kernels.table import Kernels
from octavo.proto.plan import Candidates, DrawLogprobs, Sampling
from octavo.proto.wire import Int32s, int32s


@dataclass(frozen=True)
class Draws:
    """A token for each draw."""

    tokens: Int32s
    logprobs: DrawLogprobs | None
    candidates: Candidates | None


@dataclass(frozen=True)
class _Asked:
    """The draws that want a list of the best tokens, and how many each."""

    draws: Int32s
    counts: list[int]

    def take(self, ranked: Array) -> Array:
        """Each draw's own count of its row of ``[n, k]``, one after the other."""
        return np.concatenate([ranked[i, :count] for i, count in enumerate(self.counts)])


@dataclass(frozen=True)
class Drawing:
    """Draws that the device may still be making."""

    tokens: Tensor  # [num_draws] int32, on the device
    _copy: HostCopy
    _logprobs: _Asked | None
    _candidates: _Asked | None

    def result(self) -> Draws:
        """Waits for them."""
        tokens, *rest = self._copy.wait()
        logprobs = candidates = None
        if self._logprobs is not None:
            scored, ids, best, *rest = rest
            logprobs = DrawLogprobs(
                draws=self._logprobs.draws,
                logprobs=scored,
                top_counts=int32s(self._logprobs.counts),
                top_ids=self._logprobs.take(ids),
                top_logprobs=self._logprobs.take(best),
            )
        if self._candidates is not None:
            ids, best = rest
            candidates = Candidates(
                draws=self._candidates.draws,
                counts=int32s(self._candidates.counts),
                ids=self._candidates.take(ids),
                logprobs=self._candidates.take(best),
            )
        return Draws(tokens, logprobs, candidates)


def draw(logits: Tensor, slots: Slots, drawn: Ints, kernels: Kernels) -> Drawing:
    """Draws one token for each of the slots `drawn`; appends nothing.

    Args:
        logits: ``[num_draws, vocab_size]`` float32, row i for ``drawn[i]``; left as they are.
    """
    tokens = kernels.argmax(logits).to(torch.int32)
    if slots.draws.plain[drawn].all():
        return Drawing(tokens, HostCopy([tokens]), None, None)
    searching = slots.draws.candidates[drawn] > 0
    special = np.flatnonzero(
        ~searching & (slots.draws.edits[drawn] | (slots.draws.temperature[drawn] > 0))
    )
    if len(special):
        rows = torch.from_numpy(special).to(logits.device)
        own = logits
        if len(special) < len(drawn) or slots.draws.edits[drawn].any():
            own = logits[rows]  # a copy: reported log-probabilities are of the raw logits
            _edit(own, slots, drawn[special])
        params = _draw_params(slots, drawn[special], logits.device)
        tokens[rows] = kernels.sample(own, params).to(torch.int32)
    to_host = [tokens]
    asked = searched = None
    wants = np.flatnonzero(slots.draws.wants_logprobs[drawn])
    if len(wants):
        counts = [slots.sampling(slot).logprobs or 0 for slot in drawn[wants].tolist()]
        asked = _Asked(int32s(wants), [min(count, logits.shape[1]) for count in counts])
        rows = torch.from_numpy(wants).to(logits.device)
        to_host += score(logits[rows], tokens[rows], max(asked.counts), kernels)
    beams = np.flatnonzero(searching)
    if len(beams):
        counts = slots.draws.candidates[drawn[beams]].tolist()
        searched = _Asked(int32s(beams), [min(count, logits.shape[1]) for count in counts])
        to_host += _candidates(logits, slots, drawn, beams, max(searched.counts), kernels)
    return Drawing(tokens, HostCopy(to_host), asked, searched)


def _candidates(
    logits: Tensor,
    slots: Slots,
    drawn: Ints,
    beams: np.ndarray[tuple[int], np.dtype[np.int64]],
    k: int,
    kernels: Kernels,
) -> list[Tensor]:
    """The k best continuations of the draws `beams`: ``[n, k]`` ids and log-probabilities.

    Edits apply to log-probabilities, as in Hugging Face's beam search.
    """
    own = torch.log_softmax(logits[torch.from_numpy(beams).to(logits.device)], dim=1)
    _edit(own, slots, drawn[beams])
    ids = kernels.top_ids(own, k)
    return [ids.to(torch.int32), own.gather(1, ids)]


def _draw_params(slots: Slots, drawn: Ints, device: torch.device) -> DrawParams:
    draws = slots.draws
    positions = slots.lengths[drawn].astype(np.int64)
    samples = slots.samples[drawn].astype(np.int64)
    return DrawParams(
        temperature=torch.from_numpy(draws.temperature[drawn]).to(device),
        top_k=torch.from_numpy(draws.top_k[drawn]).to(device),
        top_p=torch.from_numpy(draws.top_p[drawn]).to(device),
        min_p=torch.from_numpy(draws.min_p[drawn]).to(device),
        seeds=torch.from_numpy(draws.seed[drawn]).to(device),
        positions=torch.from_numpy(positions).to(device),
        samples=torch.from_numpy(samples).to(device),
    )


# -- edits: bias, then min_tokens, then penalties ---------------------------------------------------


def _edit(logits: Tensor, slots: Slots, drawn: Ints) -> None:
    for row, slot in enumerate(drawn.tolist()):
        if slots.draws.edits[slot]:
            one = logits[row : row + 1]
            sampling = slots.sampling(slot)
            _bias(one, sampling)
            if len(slots.outputs(slot)) < sampling.min_tokens:
                _forbid_endings(one, sampling)
            _penalize(one, sampling, slots.history(slot), slots.outputs(slot))


def _bias(logits: Tensor, sampling: Sampling) -> None:
    if len(sampling.bias_ids):
        ids = _tensor(sampling.bias_ids, logits)
        ops.add_bias(logits, torch.zeros_like(ids), ids, _tensor(sampling.bias_values, logits))


def _forbid_endings(logits: Tensor, sampling: Sampling) -> None:
    """No token that would end the sequence; with `ignore_eos` an EOS does not end it."""
    endings = [sampling.stop_token_ids]
    if not sampling.ignore_eos:
        endings.append(sampling.eos_token_ids)
    ids = _tensor(np.unique(np.concatenate(endings)), logits)
    ops.forbid(logits, torch.zeros_like(ids), ids)


def _penalize(logits: Tensor, sampling: Sampling, history: Ints, outputs: Ints) -> None:
    if sampling.repetition_penalty != 1.0:
        ids = _tensor(np.unique(history), logits)
        penalty = torch.tensor(sampling.repetition_penalty, device=logits.device)
        ops.penalize_repetition(logits, torch.zeros_like(ids), ids, penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and len(outputs):
        unique, counts = np.unique(outputs, return_counts=True)
        ids = _tensor(unique, logits)
        presence = torch.tensor(sampling.presence_penalty, device=logits.device)
        frequency = torch.tensor(sampling.frequency_penalty, device=logits.device)
        rows = torch.zeros_like(ids)
        ops.penalize_output(logits, rows, ids, _tensor(counts, logits), presence, frequency)


def _tensor(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], like: Tensor) -> Tensor:
    """On the device of `like`; integers as int64, as indexing wants them."""
    dtype = np.int64 if np.issubdtype(values.dtype, np.integer) else values.dtype
    return torch.tensor(values.astype(dtype), device=like.device)


# -- log-probabilities ------------------------------------------------------------------------------


def score(logits: Tensor, tokens: Tensor, k: int, kernels: Kernels) -> list[Tensor]:
    """Log-probabilities of `tokens` under raw logits, and the k best of each row, best first.

    Returns:
        ``[n]`` log-probabilities, ``[n, k]`` ids (int32) and ``[n, k]`` log-probabilities.
    """
    normalizer = kernels.log_normalizer(logits)[:, None]
    ids = kernels.top_ids(logits, k)
    own = (logits.gather(1, tokens.long()[:, None]) - normalizer).squeeze(1)
    return [own, ids.to(torch.int32), logits.gather(1, ids) - normalizer]
