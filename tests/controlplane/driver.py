"""Drives a scheduler against the toy worker, and collects what each request is told."""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from toy_worker import ToyWorker, expected_outputs

from octavo.controlplane.counters import Counters
from octavo.controlplane.draft import Draft, Shape
from octavo.controlplane.outputs import Outputs
from octavo.controlplane.scheduler import Scheduler
from octavo.controlplane.sequence import OrderedGroups, SequenceGroup
from octavo.controlplane.suspects import count_loss
from octavo.proto.plan import Sampling
from octavo.proto.session import Finish, SampleState, Submit
from octavo.proto.wire import int32s

GATEWAY = 7


def shape(**changes: object) -> Shape:
    """A tiny gang; any field can be changed."""
    values: dict[str, object] = {
        "epoch": 1,
        "block_size": 4,
        "num_blocks": 12,
        "num_cpu_blocks": 0,
        "num_slots": 8,
        "max_model_len": 48,
        "max_batched_tokens": 16,
        "prefill_chunk": 6,
        "watermark": 0.01,
        "preemption": "recompute",
        "prefix_caching": False,
    }
    return Shape(**{**values, **changes})  # type: ignore[arg-type]


def submit(request: int, prompt: list[int], max_tokens: int, n: int = 1, **changes: object) -> Submit:
    """A request with one-token EOS sets and the like left out unless asked for."""
    sampling = changes.pop("sampling", None) or Sampling(seed=request)
    values: dict[str, object] = {
        "gateway": GATEWAY,
        "request": request,
        "attempt": 0,
        "arrival": float(request),
        "priority": 0,
        "prompt": int32s(prompt),
        "samples": [SampleState() for _ in range(n)],
        "max_tokens": max_tokens,
        "sampling": sampling,
    }
    return Submit(**{**values, **changes})  # type: ignore[arg-type]


@dataclass
class Told:
    """What the gateway has been told of one request."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finishes: dict[int, Finish] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)
    cached: int = 0
    failure: tuple[str, str] | None = None


class Driver:
    """One scheduler, one toy worker, `depth` plans in flight."""

    def __init__(self, gang: Shape, depth: int = 2) -> None:
        self.depth = depth
        self.waiting = OrderedGroups()
        self.counters = Counters()
        self.scheduler = Scheduler(gang, self.waiting, self.counters)
        self.worker = ToyWorker(gang)
        self.frames: deque[bytes] = deque()
        self.groups: dict[int, SequenceGroup] = {}
        self.told: dict[int, Told] = defaultdict(Told)
        self._serial = 0

    def add(self, request: Submit) -> str | None:
        """Queues a request; returns why it could never run, if so."""
        group = SequenceGroup.from_submit(Submit.unpack(request.pack()), self._serial)
        self._serial += 1
        reason = self.scheduler.fit(group)
        if reason is None:
            self.groups[request.request] = group
            self.waiting.add(group)
        return reason

    def step(self) -> bool:
        """Sends what can be sent, then runs the oldest plan. Returns whether anything happened."""
        while len(self.frames) < self.depth:
            plan = self.scheduler.schedule()
            self._hear(self.scheduler.take_outputs())
            self.scheduler.check()
            if plan is None:
                break
            self.frames.append(plan.pack())
        if not self.frames:
            return False
        self._hear(self.scheduler.process(self.worker.run(self.frames.popleft())))
        self.scheduler.check()
        return True

    def run(self, steps: int = 10_000) -> None:
        """Steps until idle; fails when that takes more than `steps`."""
        for _ in range(steps):
            if not self.step():
                return
        raise AssertionError(f"not idle after {steps} steps")

    def reset(self, gang: Shape, orderly: bool = True) -> None:
        """The worker is lost and another one comes."""
        self.frames.clear()
        cause = None if orderly else count_loss(self.scheduler)
        for group in self.scheduler.evacuate():
            if group is cause:
                self.scheduler.fail(group, "INTERNAL", "lost alone")
            else:
                self.waiting.add(group)
        self.scheduler.begin(gang, self.scheduler.speeds)
        self.scheduler.refit(self.waiting)
        self._hear(self.scheduler.take_outputs())
        self.worker = ToyWorker(gang)

    def force_preemption(self, request: int) -> None:
        """Preempts a running group as a shortage would, and lets the worker hear of it."""
        draft = Draft(budget=0)
        self.scheduler._preempt(draft, self.groups[request])
        plan = self.scheduler._launch(draft)
        self._hear(self.scheduler.process(self.worker.run(plan.pack())))

    def cancel(self, request: int, samples: set[int] | None = None) -> None:
        self.scheduler.cancel(self.groups[request], samples or set())
        self._hear(self.scheduler.take_outputs())

    def check_idle(self) -> None:
        """Nothing is held by anyone."""
        assert self.scheduler.is_idle and not self.waiting
        for pool in (self.scheduler.blocks.device, self.scheduler.blocks.swap):
            state = pool.state()
            assert state.free + state.cached + state.pinned == state.total
        assert not self.worker.slots, "the worker still holds slots"

    def check_answer(self, request: Submit, end: int | None = None) -> None:
        """Each sample got exactly the tokens of an undisturbed run, and the right end."""
        told = self.told[request.request]
        sampling = request.sampling
        if request.beams is not None:
            self._check_search(request, end)
            return
        end = end if end is not None else len(request.prompt) + request.max_tokens
        stops = set(sampling.stop_token_ids.tolist())
        stops |= set() if sampling.ignore_eos else set(sampling.eos_token_ids.tolist())
        for sample in range(len(request.samples)):
            wanted = expected_outputs(request.prompt.tolist(), sampling, sample, end, stops)
            before = request.samples[sample].tokens.tolist()
            assert before + told.tokens[sample] == wanted
            stopped = bool(wanted) and wanted[-1] in stops
            assert told.finishes[sample].reason == ("stop" if stopped else "length")
            assert told.finishes[sample].stop_token == (wanted[-1] if stopped else None)

    def _check_search(self, request: Submit, end: int | None) -> None:
        """A beam search gives what it gives alone, with a pool that is large enough."""
        told = self.told[request.request]
        alone = Driver(shape(num_blocks=200, max_model_len=end or 48, num_slots=16), depth=1)
        assert alone.add(request) is None
        alone.run()
        wanted = alone.told[request.request]
        assert told.tokens == wanted.tokens
        assert told.finishes == wanted.finishes and len(told.finishes) == len(request.samples)

    def _hear(self, outputs: Outputs) -> None:
        for gateway, message in outputs.token_messages(controlplane=1):
            assert gateway == GATEWAY
            rows = zip(message.requests, message.samples, message.offsets, message.tokens, strict=True)
            for request, sample, offset, token in rows:
                tokens = self.told[int(request)].tokens[int(sample)]
                before = len(self.groups[int(request)].sequences[int(sample)].outputs)
                assert int(offset) >= len(tokens) or before, "a token came twice"
                tokens.append(int(token))
            for number, cached in zip(message.started.tolist(), message.cached.tolist(), strict=True):
                self.told[number].cached = cached
            for finish in message.finishes:
                assert finish.sample not in self.told[finish.request].finishes, "finished twice"
                self.told[finish.request].finishes[finish.sample] = finish
            for scores in message.prompt_scores:
                told = self.told[scores.request].scores
                assert scores.start == len(told) + 1, "prompt scores repeat or miss a position"
                told.extend(scores.logprobs.tolist())
        for _, failure in outputs.failure_messages(controlplane=1):
            self.told[failure.request].failure = (failure.code, failure.reason)
