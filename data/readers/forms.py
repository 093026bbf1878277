"""The forms of JSON objects that are documents, and which part of them the loss counts."""

import dataclasses
from typing import Any, Protocol

import numpy as np

from data.readers.reader import Document

ASSISTANT = "assistant"


class Form(Protocol):
    """Converts an object to a document. Pickled to workers.

    option, needs, example: for errors, the option and what it needs.
    """

    @property
    def option(self) -> str: ...
    @property
    def needs(self) -> str: ...
    @property
    def example(self) -> str: ...
    def texts(self, record: dict[str, Any]) -> list[str] | None: ...  # None: of another form
    def known(self, record: dict[str, Any]) -> set[str]: ...  # keys that may have been meant
    def document(self, texts: list[bytes]) -> Document: ...


@dataclasses.dataclass(frozen=True)
class TextForm:
    """The text under a key, all of which counts."""

    field: str

    @property
    def option(self) -> str:
        return f"config.data.field={self.field!r}"

    @property
    def needs(self) -> str:
        return "text under that key"

    @property
    def example(self) -> str:
        return f'an object, {{"{self.field}": "..."}}'

    def texts(self, record: dict[str, Any]) -> list[str] | None:
        text = record.get(self.field)
        return [text] if isinstance(text, str) else None

    def known(self, record: dict[str, Any]) -> set[str]:
        return {key for key, value in record.items() if isinstance(value, str)}

    def document(self, texts: list[bytes]) -> Document:
        return Document(texts[0])


@dataclasses.dataclass(frozen=True)
class CompletionForm:
    """`prompt` and `completion`; the completion and the end id count."""

    option = "config.data.loss_on='completion'"
    needs = "line with texts under both 'prompt' and 'completion'"
    example = 'an object, {"prompt": "...", "completion": "..."}'

    def texts(self, record: dict[str, Any]) -> list[str] | None:
        return _all_texts([record.get("prompt"), record.get("completion")])

    def known(self, record: dict[str, Any]) -> set[str]:
        return set(record)

    def document(self, texts: list[bytes]) -> Document:
        prompt, completion = texts
        end = len(prompt) + len(completion) + 1
        return Document(prompt + completion, counted=np.asarray([[len(prompt), end]], np.int64))


@dataclasses.dataclass(frozen=True)
class MessagesForm:
    """`messages`, a list of objects with `role` and `content`: lines "role: content".

    For messages of "assistant", the content and its line end count, and the end id after the last.
    """

    option = "config.data.loss_on='assistant'"
    needs = "line with a list 'messages' of objects with texts 'role' and 'content'"
    example = 'an object, {"messages": [{"role": "user", "content": "..."}]}'

    def texts(self, record: dict[str, Any]) -> list[str] | None:
        messages = record.get("messages")
        if not isinstance(messages, list) or not messages:
            return None
        if not all(isinstance(message, dict) for message in messages):
            return None
        return _all_texts([message.get(key) for message in messages for key in ("role", "content")])

    def known(self, record: dict[str, Any]) -> set[str]:
        return set(record)

    def document(self, texts: list[bytes]) -> Document:
        text, counted = bytearray(), []
        for role, content in zip(texts[::2], texts[1::2]):
            text += role + b": "
            start = len(text)
            text += content + b"\n"
            if role == ASSISTANT.encode():
                counted.append([start, len(text)])
        if counted and counted[-1][1] == len(text):
            counted[-1][1] += 1
        return Document(bytes(text), counted=np.asarray(counted, np.int64).reshape(-1, 2))


def _all_texts(values: list[Any]) -> list[str] | None:
    texts = [value for value in values if isinstance(value, str)]
    return texts if len(texts) == len(values) else None


def form_of(loss_on: str, field: str) -> Form:
    """The form selected by config.data.loss_on and config.data.field."""
    forms: dict[str, Form] = {
        "text": TextForm(field),
        "completion": CompletionForm(),
        "assistant": MessagesForm(),
    }
    return forms[loss_on]
