"""Generation, whichever API asks for it: calls in, streams of deltas out."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from octavo.common.modelfiles import ModelFiles
from octavo.frontend.chat import ChatTemplate, no_template
from octavo.frontend.errors import RequestError, invalid
from octavo.frontend.link import Link
from octavo.frontend.metrics import Metrics
from octavo.frontend.options import GatewayOptions
from octavo.frontend.prefixes import Prefix
from octavo.frontend.requests import ChatPrompt, GenerateCall
from octavo.frontend.sample import TextRules, echo_prompt
from octavo.frontend.streams import Batch, PreparedRequest, Stream
from octavo.frontend.tokenizer import Tokenizer
from octavo.frontend.validation import (
    MAX_N,
    Limits,
    check_call,
    check_ids,
    check_prefix,
    check_prefix_name,
    check_prefix_tokens,
    check_text,
    check_tokens,
    wire_sampling,
)
from octavo.proto.session import PinState
from octavo.proto.wire import int32s

log = logging.getLogger(__name__)

T = TypeVar("T")


class Generator:
    """Turns checked calls into live requests, within the gateway's limits."""

    def __init__(
        self,
        model: ModelFiles,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        link: Link,
        metrics: Metrics,
        options: GatewayOptions,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.template = template
        self.link = link
        self.metrics = metrics
        self._options = options
        self._preparing = 0
        self._is_stopping = False
        self._threads = ThreadPoolExecutor(options.tokenizer_threads, thread_name_prefix="tokenizer")
        metrics.gauge("octavo_live_requests", "Requests that are not finished", lambda: self.live_count)

    @property
    def live_count(self) -> int:
        return self.link.live_count + self._preparing

    def limits(self) -> Limits:
        """What can be asked for now; the control plane may set lower limits than the model's."""
        own = self.model.config["max_position_embeddings"]
        welcome = self.link.welcome
        return Limits(
            vocab_size=self.model.config["vocab_size"],
            max_model_len=min(own, welcome.max_model_len or own) if welcome else own,
            max_sequences=(welcome.max_sequences or MAX_N) if welcome else MAX_N,
            max_token_chars=self.tokenizer.max_token_chars,
            num_eos=len(self.model.eos_token_ids),
        )

    async def open(self, calls: Sequence[GenerateCall]) -> Batch:
        """Starts one request for each call; all or none. Raises RequestError.

        The batch must be closed, or the requests run to their end.
        """
        limits = self.limits()
        for call in calls:
            check_call(call, limits)
        with self._places(len(calls)):
            prepared = await asyncio.gather(*(self._prepare(call, limits) for call in calls))
            if self._options.log_prompts:
                self._log_prompts(prepared)
        streams = [Stream(request, self.link, self.metrics) for request in prepared]
        batch = Batch(streams, self._options.max_unread_tokens)
        batch.start()
        return batch

    async def tokenize(self, prompt: str | ChatPrompt, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text or of chat messages. Raises RequestError."""
        with self._places(1):
            return await self._run(self._tokens_of, prompt, add_special_tokens, self.limits())

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of token ids. Raises RequestError."""
        check_ids("token_ids", token_ids, self.limits())
        with self._places(1):
            return await self._run(self.tokenizer.decode, token_ids, skip_special_tokens)

    async def register_prefix(
        self, name: str, prompt: str | Sequence[int], cache_salt: str
    ) -> PinState:
        """Computes and pins a prefix; returns when that is done. Raises RequestError."""
        self._check_taking()
        limits = self.limits()
        check_prefix(name, cache_salt)
        tokens = await self.tokenize(prompt) if isinstance(prompt, str) else prompt
        check_prefix_tokens(tokens, limits)
        return await self.link.prefixes.register(Prefix(name, int32s(tokens), cache_salt))

    async def unregister_prefix(self, name: str) -> None:
        """Raises RequestError, NOT_FOUND for a name that is not registered."""
        check_prefix_name(name)
        await self.link.prefixes.unregister(name)

    def stop_taking(self) -> None:
        """From now on requests are refused; running ones go on."""
        self._is_stopping = True

    def _check_taking(self) -> None:
        if self._is_stopping:
            raise RequestError("UNAVAILABLE", "the gateway is stopping: retry later, or at another")

    def _log_prompts(self, requests: Sequence[PreparedRequest]) -> None:
        for request in requests:
            log.info("prompt: %r", self.tokenizer.decode(request.prompt, skip_special_tokens=False))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    @contextlib.contextmanager
    def _places(self, count: int) -> Iterator[None]:
        """Counts requests in before they cost anything. Raises RequestError when full."""
        self._check_taking()
        most = self._options.max_live_requests
        if self.live_count + count > most:
            raise RequestError(
                "RESOURCE_EXHAUSTED",
                f"the gateway has its limit of {most} live requests (--max-live-requests); retry later",
            )
        self._preparing += count
        try:
            yield
        finally:
            self._preparing -= count

    async def _prepare(self, call: GenerateCall, limits: Limits) -> PreparedRequest:
        arrival = time.time()
        if isinstance(call.prompt, str | ChatPrompt):
            prompt = await self._run(self._tokens_of, call.prompt, call.add_special_tokens, limits)
        else:
            prompt = list(call.prompt)
        max_tokens = check_tokens(call, prompt, limits)
        echo, offsets = await self._run(self._echo, call, prompt) if call.echo else ("", [])
        eos = self.model.eos_token_ids
        endings = frozenset([*call.sampling.stop_token_ids, *(() if call.sampling.ignore_eos else eos)])
        return PreparedRequest(
            call=call,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=wire_sampling(call.sampling, eos, limits.vocab_size),
            rules=TextRules(self.tokenizer.vocabulary, call.sampling, endings, prompt, echo),
            offsets=offsets,
            arrival=arrival,
        )

    def _tokens_of(
        self, prompt: str | ChatPrompt, add_special_tokens: bool, limits: Limits
    ) -> list[int]:
        """Runs on a tokenizer thread."""
        if isinstance(prompt, str):
            check_text("prompt", prompt, limits)
            return self.tokenizer.encode(prompt, add_special_tokens)
        if self.template is None:
            raise no_template()
        if not prompt.messages:
            raise invalid("messages", "must have at least 1 message")
        text = self.template.render(prompt.messages)
        check_text("messages", text, limits)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _echo(self, call: GenerateCall, prompt: Sequence[int]) -> tuple[str, list[int]]:
        """The prompt as text. What the tokenizer itself has put before a text is not part of it."""
        added = 0
        if isinstance(call.prompt, str) and call.add_special_tokens:
            added = self.tokenizer.added_prefix(prompt, call.prompt)
        return echo_prompt(self.tokenizer.vocabulary, prompt, added)
