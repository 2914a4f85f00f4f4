"""Text to token ids and back, from a Hugging Face directory or from GGUF metadata.

Nothing is added to a text unless asked for, and every token that may end a turn is a stop.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from models import gguf_tokenizer

_TURN_ENDS = ("<|eot_id|>", "<|end_of_text|>", "<|im_end|>")
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer; immutable."""

    definition: str  # a tokenizer.json
    chat_template: str | None  # Jinja
    bos_id: int | None
    add_bos: bool  # whether the model was trained with a BOS before the text
    stop_ids: frozenset[int]  # any of them ends a generation
    special_tokens: tuple[tuple[str, str], ...] = ()  # (role, text): what a chat template may name

    @cached_property
    def _backend(self) -> Backend:
        return _without_padding(Backend.from_str(self.definition))

    @cached_property
    def _plain_backend(self) -> Backend:
        backend = _without_padding(Backend.from_str(self.definition))
        backend.encode_special_tokens = True
        return backend

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special: bool = True, bos: bool = False) -> list[int]:
        """Turn text into token ids.

        Args:
            text: any text.
            special: read `<|im_start|>` and the like as the tokens they name; False encodes their
                letters, for text that comes from outside.
            bos: put the BOS first if the model wants one and the text does not begin with it.

        Returns:
            Token ids.
        """
        backend = self._backend if special else self._plain_backend
        ids = backend.encode(text, add_special_tokens=False).ids
        if bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Turn token ids into text.

        Args:
            ids: token ids.
            special: keep the text of special tokens.

        Returns:
            The text.
        """
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=not special)

    def chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation with the model's chat template.

        Args:
            messages: {"role", "content"} of each turn.
            add_generation_prompt: end with the header of the assistant's turn.

        Returns:
            The prompt as text; it may begin with the BOS.

        Raises:
            ValueError: the model has no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat_template; encode a plain prompt instead.")
        import jinja2

        try:
            return _template(self.chat_template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **dict(self.special_tokens),
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def to_json(self) -> str:
        """Serialize for a cache; `from_json` reads it."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(fields | {"stop_ids": sorted(self.stop_ids)})

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        fields["stop_ids"] = frozenset(fields["stop_ids"])
        fields["special_tokens"] = tuple(tuple(pair) for pair in fields["special_tokens"])
        return cls(**fields)


def _without_padding(backend: Backend) -> Backend:
    backend.no_padding()
    backend.no_truncation()
    return backend


def _template(source: str) -> Any:
    """Compile a chat template as transformers does: sandboxed, blocks trimmed."""
    import datetime

    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def from_hf(directory: str | Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory.

    Args:
        directory: with tokenizer.json or what transformers can convert to it.

    Returns:
        The Tokenizer; its stop ids include those of generation_config.json.

    Raises:
        ValueError: transformers finds no tokenizer there, or one without a fast form.
    """
    from transformers import AutoTokenizer

    directory = Path(directory)
    try:
        loaded = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        file = directory / "tokenizer.json"  # as it is: transformers may rebuild parts of it
        definition = (
            file.read_text(encoding="utf-8")
            if file.is_file()
            else loaded.backend_tokenizer.to_str()
        )
    except Exception as error:  # transformers raises many kinds
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{directory} holds no tokenizer that can be read, tokenizer.json is one: "
            f"{type(error).__name__}: {first:.200}"
        ) from error
    template = loaded.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    bos, flag = loaded.bos_token_id, _fields(directory, "tokenizer_config").get("add_bos_token")
    starts = loaded("a").input_ids[:1] == [bos] if flag is None else bool(flag)
    special = tuple((r, str(t)) for r in _ROLES if (t := getattr(loaded, r, None)) is not None)
    more = _fields(directory, "generation_config").get("eos_token_id")
    stops = {loaded.eos_token_id, *(more if isinstance(more, list) else [more])}
    return Tokenizer(
        definition=definition,
        chat_template=template,
        bos_id=bos,
        add_bos=bos is not None and starts,
        stop_ids=_stops(stops, loaded.get_vocab()),
        special_tokens=special,
    )


def _fields(directory: Path, name: str) -> dict[str, Any]:
    path = directory / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _stops(ids: set[int | None], vocabulary: Mapping[str, int]) -> frozenset[int]:
    named = {vocabulary[t] for t in _TURN_ENDS if t in vocabulary}
    return frozenset({int(i) for i in ids if i is not None} | named)


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that GGUF metadata describes.

    Args:
        metadata: the file's key-value pairs.

    Returns:
        The Tokenizer: byte-level BPE for `tokenizer.ggml.model` "gpt2", SentencePiece's BPE with
        byte fallback for "llama".

    Raises:
        ValueError: a key is missing, or its value names what is not known.
    """
    backend = gguf_tokenizer.build(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    names = ("bos", "eos", "unknown", "padding")
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names}
    stops = {ids["eos"], metadata.get("tokenizer.ggml.eot_token_id")}
    return Tokenizer(
        definition=backend.to_str(),
        chat_template=metadata.get("tokenizer.chat_template"),
        bos_id=ids["bos"],
        add_bos=gguf_tokenizer.adds_bos(metadata) and ids["bos"] is not None,
        stop_ids=_stops(stops, {token: i for i, token in enumerate(tokens)}),
        special_tokens=tuple(
            (role, tokens[ids[name]])
            for role, name in zip(_ROLES, names, strict=True)
            if ids[name] is not None
        ),
    )
